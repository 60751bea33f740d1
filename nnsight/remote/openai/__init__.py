"""OpenAI's interface for completions and chats, with a local model that may be compiled, edited, and steered per request."""
