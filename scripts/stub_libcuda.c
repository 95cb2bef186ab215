/* Stands in for libcuda.so.1 where there is no NVIDIA driver: NIXL's LIBFABRIC plugin links against
 * these three functions, and calls them only for memory of a GPU. Each says "no device". */

enum { CUDA_ERROR_NO_DEVICE = 100 };

int cuCtxSetCurrent(void *context)
{
    (void)context;
    return CUDA_ERROR_NO_DEVICE;
}

int cuDeviceGetPCIBusId(char *bus_id, int length, int device)
{
    (void)device;
    if (bus_id && length > 0)
        bus_id[0] = '\0';
    return CUDA_ERROR_NO_DEVICE;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long long pointer)
{
    (void)count;
    (void)attributes;
    (void)data;
    (void)pointer;
    return CUDA_ERROR_NO_DEVICE;
}
