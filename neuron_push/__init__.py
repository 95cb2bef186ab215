"""Push-based KV-cache transfer for disaggregated vLLM serving."""

__version__ = "0.1.0"
