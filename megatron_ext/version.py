"""The package's version; read by the build as text, so keep it a plain literal."""

__version__ = "0.1.0"
