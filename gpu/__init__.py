"""The CUDA device backend. The place is registered; the backend itself is not written yet."""
