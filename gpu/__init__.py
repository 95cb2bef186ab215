"""neuron_push_gpu: the device backend for NVIDIA GPUs (GPUDirect)."""
