"""Measures the floor of a step: all its matmul and attention kernels, back to back until power and clocks settle.

torchrun --nproc-per-node=4 floor.py configs.json      (a list such as [{"size": "1b", "B": 2, "T": 4096, "seconds": 30}])

All GPUs run at once, without collectives, on random operands. Queries, keys and values are one matmul, and so are gate and up projection;
attention is cuDNN's. Prints a RESULT line per configuration, with times of the slowest GPU in milliseconds:

alone_ms   sum of the medians of all kernels, each in a separate burst
first_ms   median of the loop's first five steps
loop_ms    median of the steps in the last third of the loop
mhz, watts medians per GPU over the same third, as nvidia-smi reports them
"""
import json, os, statistics, subprocess, sys, tempfile, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from peer import SIZES


def event():
    e = torch.cuda.Event(enable_timing=True)
    e.record()
    return e


def random(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Linear:
    """A linear layer y = x wᵀ with `tokens` rows, and its two gradients, all in bf16."""
    def __init__(self, tokens, fan_in, fan_out):
        self.x, self.w, self.dy = random(tokens, fan_in), random(fan_out, fan_in, scale=0.02), random(tokens, fan_out, scale=0.01)
        self.y, self.dx, self.dw = torch.empty_like(self.dy), torch.empty_like(self.x), torch.empty_like(self.w)

    def forward(self): torch.mm(self.x, self.w.t(), out=self.y)
    def input_gradient(self): torch.mm(self.dy, self.w, out=self.dx)
    def weight_gradient(self): torch.mm(self.dy.t(), self.x, out=self.dw)

    def backward(self):
        self.input_gradient()
        self.weight_gradient()


class Attention:
    """Causal grouped-query attention by cuDNN, in the layout that the projections write."""
    def __init__(self, batch, length, heads, kv, dim):
        make = lambda n: random(batch, length, n, dim).transpose(1, 2)
        self.q, self.k, self.v, self.dy = make(heads), make(kv), make(kv), make(heads)
        self.grouped, self.name = heads != kv, "cuDNN"
        for t in (self.q, self.k, self.v): t.requires_grad_()
        try:
            self.forward()
        except RuntimeError:
            # This torch does not support grouped queries with cuDNN: repeat keys and values for each query head.
            self.k, self.v = (t.detach().repeat_interleave(heads // kv, dim=1).requires_grad_() for t in (self.k, self.v))
            self.grouped, self.name = False, "cuDNN, keys and values repeated"
            self.forward()

    def forward(self):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=self.grouped)

    def backward(self, y):
        torch.autograd.grad(y, (self.q, self.k, self.v), self.dy, retain_graph=True)


class Step:
    """The kernels of one step, in the order of a step."""
    def __init__(self, d, L, h, kv, ff, V, T, B):
        tokens, dim = B * T, d // h
        self.layers = L
        self.qkv, self.out = Linear(tokens, d, (h + 2 * kv) * dim), Linear(tokens, h * dim, d)
        self.gate_up, self.down = Linear(tokens, d, 2 * ff), Linear(tokens, ff, d)
        self.head, self.attention = Linear(tokens, d, V), Attention(B, T, h, kv, dim)

    def run(self):
        outputs = []
        for _ in range(self.layers):
            self.qkv.forward()
            outputs.append(self.attention.forward())
            for l in (self.out, self.gate_up, self.down): l.forward()
        self.head.forward()
        self.head.backward()
        while outputs:
            for l in (self.down, self.gate_up, self.out): l.backward()
            self.attention.backward(outputs.pop())
            self.qkv.backward()

    def alone(self):
        """Measures every kernel in a separate burst. Returns the sum over a step and the time of each kernel, in milliseconds."""
        y = self.attention.forward()
        kernels = {"attention": (self.attention.forward, self.layers), "attention backward": (lambda: self.attention.backward(y), self.layers)}
        for name in ("qkv", "out", "gate_up", "down", "head"):
            linear, times = getattr(self, name), 1 if name == "head" else self.layers
            kernels |= {f"{name} {kind}": (getattr(linear, kind), times) for kind in ("forward", "input_gradient", "weight_gradient")}
        each = {name: (burst(f), times) for name, (f, times) in kernels.items()}
        return sum(ms * n for ms, n in each.values()), {name: round(ms, 4) for name, (ms, _) in each.items()}


def burst(f, times=8):
    torch.cuda.synchronize()
    time.sleep(0.1)
    for _ in range(2): f()
    marks = [event()]
    for _ in range(times):
        f()
        marks.append(event())
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))


def loop(step, seconds):
    """Runs steps for `seconds` and returns the milliseconds of each; the host is at most two steps ahead."""
    begin, marks = time.time(), [event()]
    while time.time() - begin < seconds:
        step.run()
        marks.append(event())
        if len(marks) > 3: marks[-3].synchronize()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


class Sampler:
    """Samples clocks and power of all GPUs every half second, if nvidia-smi is available."""
    def __init__(self):
        self.file = tempfile.TemporaryFile("w+")
        command = ["nvidia-smi", "--query-gpu=index,clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "500"]
        try:
            self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)
        except OSError:
            self.process = None

    def end(self):
        """Stops sampling. Returns the median MHz and the median watts of each GPU over the last third."""
        if not self.process: return [], []
        self.process.terminate()
        self.process.wait()
        self.file.seek(0)
        by_gpu = {}
        for line in self.file:
            cells = line.split(",")
            try:
                by_gpu.setdefault(int(cells[0]), []).append((float(cells[1]), float(cells[2])))
            except (ValueError, IndexError):
                pass
        last = [s[-max(1, len(s) // 3):] for _, s in sorted(by_gpu.items())]
        return [[round(statistics.median(x[i] for x in s)) for s in last] for i in range(2)]


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    for c in json.load(open(sys.argv[1])):
        shape = dict(SIZES[c["size"]])
        shape.update({k: c[k] for k in shape if k in c})
        step = Step(**shape, B=c["B"])
        alone, kernels = step.alone()
        dist.barrier()
        sampler = Sampler() if rank == 0 else None
        times = loop(step, c["seconds"])
        mhz, watts = sampler.end() if sampler else ([], [])
        mine = {"alone_ms": alone, "first_ms": statistics.median(times[:5]), "loop_ms": statistics.median(times[-max(1, len(times) // 3):])}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            slowest = {k: round(max(e[k] for e in everyone), 2) for k in mine}
            print("RESULT " + json.dumps({**c, **slowest, "loop_ms_by_gpu": [round(e["loop_ms"], 2) for e in everyone], "steps": len(times), "mhz": mhz, "watts": watts,
                                          "attention": step.attention.name, "kernels_ms": kernels, "gpu": torch.cuda.get_device_name()}), flush=True)
        del step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__": main()
