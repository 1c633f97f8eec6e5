"""OpenAI's Responses API. Without storage each request carries the whole conversation.

With storage (`responses_db`), `store` keeps responses in a SQLite file, `history` continues their conversations, and
`background` generates responses while no client waits.
"""
