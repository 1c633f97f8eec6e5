"""The public classes and functions; `ferrule/__init__.pyi` lists the names that the package exports."""
