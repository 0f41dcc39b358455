"""Trains a Llama from a Hugging Face folder under FSDP2, with the same samples of a file of tokens as `shardlab exec`.

torchrun --nproc-per-node=2 converge.py configs.json      (a JSON list of configurations; keys below)
  {"init": DIR, "data": FILE, "steps": 300, "B": 2, "T": 4096, "warmup": 20, "lr": 3e-4, "clip": 1.0, "betas": [0.9, 0.95],
   "weight_decay": 0.1, "compile": true, "dtype": "bfloat16"|"float32", "float8": "tensorwise"|"rowwise"|null, "loss": "liger"|null}

Prints the mean loss over all ranks and the gradient norm before clipping for each step. Also runs on CPUs, with gloo.
"""
import json, os, sys, traceback
from pathlib import Path
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peer import Llama, WithLoss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Hugging Face names of the parameters of peer.py's model.
NAMES = {"tok.": "model.embed_tokens.", "norm.": "model.norm.", "out.": "lm_head.", "head.norm.": "model.norm.", "head.out.": "lm_head."}
BLOCK = {"n1": "input_layernorm", "n2": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
         "o": "self_attn.o_proj", "w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj"}


def hf_name(name):
    """Returns the Hugging Face name of a parameter, such as `model.layers.0.self_attn.q_proj.weight` for `layers.0.q.weight`."""
    name = name.replace("_orig_mod.", "")
    if name.startswith("layers."):
        _, layer, part, rest = name.split(".", 3)
        return f"model.layers.{layer}.{BLOCK[part]}.{rest}"
    prefix = next(p for p in sorted(NAMES, key=len, reverse=True) if name.startswith(p))
    return NAMES[prefix] + name[len(prefix):]


def load(model, folder):
    """Copies the weights of the folder into the parameters of the model."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(file))
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = tensors.pop(hf_name(name)).to(DEVICE, torch.float32)
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    if tensors:
        raise ValueError(f"no parameter takes {sorted(tensors)}")


def build(c, world):
    hf = json.loads((Path(c["init"]) / "config.json").read_text())
    heads, d = hf["num_attention_heads"], hf["hidden_size"]
    with torch.device("meta"):
        m = Llama(d, hf["num_hidden_layers"], heads, hf["num_key_value_heads"], hf["intermediate_size"], hf["vocab_size"], c["T"])
    if c.get("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        config = Float8LinearConfig() if c["float8"] == "tensorwise" else Float8LinearConfig.from_recipe_name(c["float8"])
        convert_to_float8_training(m, config=config, module_filter_fn=lambda mod, name: isinstance(mod, nn.Linear) and name != "out")
    if c.get("compile"):
        for l in m.layers:
            l.compile(fullgraph=True)
    mesh = init_device_mesh(DEVICE, (world,))
    kw = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, c["dtype"]), reduce_dtype=torch.float32)}
    for l in m.layers:
        fully_shard(l, **kw)
    if c.get("loss"):
        m = WithLoss(m, c["loss"])
        fully_shard(m.head, **kw)
    fully_shard(m, **kw)
    m.to_empty(device=DEVICE)
    load(m, c["init"])
    inv = 1.0 / (hf["rope_theta"] ** (torch.arange(0, m.hd, 2, device=DEVICE).float() / m.hd))
    angles = torch.outer(torch.arange(m.T, device=DEVICE).float(), inv)
    m.cos.copy_(angles.cos())
    m.sin.copy_(angles.sin())
    return m, hf["vocab_size"]


def batch(tokens, c, step, rank, world):
    """Returns the samples of a rank, shape [B, T + 1]: sample i of the run has the T + 1 tokens that start at i * T."""
    B, T = c["B"], c["T"]
    span = len(tokens) - T - 1
    starts = [(step * world * B + rank * B + j) * T % span for j in range(B)]
    return torch.from_numpy(np.stack([tokens[s:s + T + 1] for s in starts]).astype(np.int64)).to(DEVICE)


def run(c):
    rank, world = dist.get_rank(), dist.get_world_size()
    m, vocab = build(c, world)
    tokens = np.memmap(c["data"], dtype=np.uint32, mode="r")
    opt = torch.optim.AdamW(m.parameters(), lr=c["lr"], betas=tuple(c["betas"]), weight_decay=c["weight_decay"], fused=True)
    losses, norms = [], []
    for i in range(c["steps"]):
        for group in opt.param_groups:
            group["lr"] = c["lr"] * min(1.0, (i + 1) / max(c["warmup"], 1))
        data = batch(tokens, c, i, rank, world)
        x, y = data[:, :-1], data[:, 1:]
        loss = m(x, y) if c.get("loss") else F.cross_entropy(m(x).view(-1, vocab).float(), y.reshape(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(m.parameters(), c["clip"])
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    mean = torch.stack(losses).float()
    dist.all_reduce(mean)
    mean /= world
    if rank == 0:
        print("RESULT " + json.dumps({**c, "losses": [float(x) for x in mean], "grad_norms": [float(x) for x in norms]}), flush=True)


if __name__ == "__main__":
    local = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    for c in json.load(open(sys.argv[1])):
        try:
            run(c)
        except Exception as e:  # noqa: BLE001
            if local == 0:
                print("FAILED", json.dumps(c), repr(e)[:800], flush=True)
                traceback.print_exc()
    dist.barrier()
    dist.destroy_process_group()
