"""Re-exports the options of the library."""

from ..config import CONFIG, ApiConfig, AppConfig, Config

__all__ = ["CONFIG", "ApiConfig", "AppConfig", "Config"]
