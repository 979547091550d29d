"""The HTTP server: OpenAI's API and a chat page over an `AsyncEngine`. It translates and does nothing more."""
