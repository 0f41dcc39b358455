"""Checkpoints of torch.distributed.checkpoint with FSDP2 on CPU ranks (torch 2.15).

torchrun --nproc-per-node=2 make.py make fsdp2           writes a folder after three steps, and expected.json
torchrun --nproc-per-node=3 make.py check DCP OUT        loads a folder that `shardlab checkpoint export` wrote, and saves it again
"""
import json, os, sys
import torch, torch.distributed as dist, torch.nn as nn
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


class Model(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(s, x):
        for layer in s.layers:
            x = layer(x)
        return x


torch.manual_seed(int(sys.argv[1] == "check"))
model = Model()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def step():
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states():
    m, o = get_state_dict(model, optimizer)
    return {"model": m, "optimizer": o}


if sys.argv[1] == "make":
    for _ in range(3):
        step()
    state = states()
    dcp.save(state, checkpoint_id=sys.argv[2])
    expected = {}
    for name, weight in state["model"].items():
        kinds = {"weight": weight, **{k: state["optimizer"]["state"][name][k] for k in ("exp_avg", "exp_avg_sq")}}
        expected[name] = {k: v.full_tensor().flatten().tolist() for k, v in kinds.items()}
    if dist.get_rank() == 0:
        json.dump(expected, open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json"), "w"))
else:
    # The optimizer has states before they are loaded.
    step()
    state = states()
    dcp.load(state, checkpoint_id=sys.argv[2])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dcp.save(states(), checkpoint_id=sys.argv[3])
    if dist.get_rank() == 0:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        print(json.dumps({"step": float(next(iter(optimizer.state.values()))["step"]), "groups": groups}))
dist.destroy_process_group()
