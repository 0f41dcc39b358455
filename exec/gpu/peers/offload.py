"""Measures AdamW and clipping on the CPU under FSDP2 with CPUOffloadPolicy on one GPU, with several numbers of threads.

    python3 exec/gpu/peers/offload.py [LAYERS]

Prints a row per setting: median times of a step and of the optimizer in ms, and the rate of the optimizer in GB/s at
28 bytes per parameter (it reads and writes the weight and two moments in float32, and reads the gradient).
"""
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
import peer

THREADS = (16, 8, 4, 2, 1)


def model(mesh, layers):
    sizes = dict(peer.SIZES["1b"], L=layers)
    with torch.device("meta"): m = peer.Llama(**sizes)
    kw = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), offload_policy=CPUOffloadPolicy())
    for layer in m.layers: fully_shard(layer, **kw)
    fully_shard([m.norm, m.out], reshard_after_forward=False, **kw)
    fully_shard(m.tok, **kw)
    fully_shard(m, **kw)
    m.to_empty(device="cpu")
    with torch.no_grad():
        for p in m.parameters(): p.to_local().normal_(0, 0.02) if p.dim() > 1 else p.to_local().fill_(1)
    inverse = 1.0 / (500000.0 ** (torch.arange(0, m.hd, 2).float() / m.hd))
    angles = torch.outer(torch.arange(m.T).float(), inverse)
    m.cos, m.sin = angles.cos().cuda(), angles.sin().cuda()
    return m, sizes


def backward(m, sizes):
    data = torch.randint(0, sizes["V"], (1, sizes["T"] + 1)).cuda()
    peer.loss_fn(m, data[:, :-1], data[:, 1:], sizes["V"]).backward()


def median(times): return sorted(times)[len(times) // 2]


def steps(m, sizes, opt, n):
    """Runs `n` steps and returns the median seconds of a step and of its optimizer, without the first step."""
    whole, optimizer = [], []
    for _ in range(n):
        torch.cuda.synchronize(); start = time.perf_counter()
        backward(m, sizes)
        before = time.perf_counter(); opt.step(); after = time.perf_counter()
        opt.zero_grad(); torch.cuda.synchronize()
        whole.append(time.perf_counter() - start); optimizer.append(after - before)
    return median(whole[1:]), median(optimizer[1:])


def main(layers):
    for key, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1").items(): os.environ.setdefault(key, value)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    m, sizes = model(init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)), layers)
    params = sum(p.numel() for p in m.parameters())
    for fused in (True, None):
        opt = torch.optim.AdamW(m.parameters(), lr=3e-4, fused=fused)
        for threads in THREADS:
            torch.set_num_threads(threads)
            step, optimizer = steps(m, sizes, opt, 6 if fused or threads > 2 else 3)
            print(json.dumps(dict(optimizer="fused" if fused else "default", threads=threads, params=params, step_ms=1e3 * step, optimizer_ms=1e3 * optimizer, gbps=28e-9 * params / optimizer)), flush=True)
    for threads in THREADS:
        torch.set_num_threads(threads)
        backward(m, sizes)
        times = []
        for _ in range(3):
            start = time.perf_counter(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); times.append(time.perf_counter() - start)
        m.zero_grad()
        print(json.dumps(dict(clip=True, threads=threads, ms=1e3 * median(times), gbps=12e-9 * params / median(times))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__": main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
