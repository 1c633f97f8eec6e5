"""Parameters of requests and of the engine: fields, defaults, and checks."""
