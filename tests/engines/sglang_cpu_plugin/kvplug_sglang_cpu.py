"""A plug-in for SGLang 0.5.23, in tests only: what its cache lacks on a CPU.

In:  an SGLang with HiCache, or a model with windows.
Out: copies between device and host by indexing, where SGLang has kernels for GPUs alone; reads of a
     window's layers from their own pool, where its backend `torch_native` reads at the places of
     the other pool, which may lie beyond the end.

The trees, what they keep and evict, and their events are SGLang's.
"""

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
PLACES = 4  # where req_to_token is among their arguments


def register():
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    common._cuda_host_register = lambda *args, **kwargs: None
    MHATokenToKVPoolHost.load_to_device_per_layer = load
    MHATokenToKVPoolHost.backup_from_device_all_layer = backup
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        HookRegistry.register(f"{BACKEND}.{name}", read_own_pool, HookType.AROUND)


def load(pool, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    for host, device in layers_of(pool, [layer_id]):
        copies = host[host_indices.long()]
        device[device_indices.long()] = copies.view(-1, *device.shape[1:])


def backup(pool, device_pool, host_indices, device_indices, io_backend):
    for host, device in layers_of(pool, range(len(pool.device_k_buffers))):
        pages = device[device_indices.long()]
        host[host_indices.long()] = pages.view(-1, *host.shape[1:])


def layers_of(pool, layer_ids):
    for layer_id in layer_ids:
        yield pool.k_buffer[layer_id], pool.device_k_buffers[layer_id]
        yield pool.v_buffer[layer_id], pool.device_v_buffers[layer_id]


def read_own_pool(attend, backend, *args, **kwargs):
    window = kwargs.get("sliding_window_size")
    if backend.use_sliding_window_kv_pool and window is not None and window > -1:
        places = backend.token_to_kv_pool.translate_loc_from_full_to_swa(args[PLACES].long())
        args = (*args[:PLACES], places, *args[PLACES + 1 :])
    return attend(backend, *args, **kwargs)
