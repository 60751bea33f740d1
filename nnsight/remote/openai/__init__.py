"""Completions and chats in OpenAI's form, from a model of this process, which may be compiled, edited and steered request by request."""
