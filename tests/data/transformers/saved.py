"""Lists what autograd saves in, and which operators run in, one decoder layer of tiny models of transformers: `saved.jsonl`.

    python3 saved.py > saved.jsonl        (torch 2.x and transformers 5, on a GPU: attention differs on a CPU)

One line for each file of `configs` and each way to compute attention that its class has. Saved tensors are counted once per memory,
without parameters, and by the layer during whose forward they are saved; `forward` and `backward` count the operators that would launch a
kernel. Everything is the difference between a model of three and one of two layers, in bfloat16, with a micro-batch of two sequences of
64 tokens, so the ends of the model cancel out."""
import collections, glob, json, os, torch
from torch.utils._python_dispatch import TorchDispatchMode
import transformers
from transformers import AutoConfig

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
VIEWS = {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "expand", "slice", "detach", "alias", "reshape", "permute", "squeeze", "select", "as_strided", "split", "empty", "empty_like",
         "new_empty", "new_empty_strided", "empty_strided", "lift_fresh", "_reshape_alias", "_local_scalar_dense", "scalar_tensor"}


class Launches(TorchDispatchMode):
    """Counts operators that are no views."""
    def __init__(self): super().__init__(); self.names = collections.Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS: self.names[name] += 1
        return func(*args, **(kwargs or {}))


def count(fields, attention, layers):
    fields = dict(fields); name = fields["architectures"][0]
    for key in LAYERS:
        if key in fields: fields[key] = layers
    if "attention_types" in fields: fields["attention_types"] = [[["global"], layers]]
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    m = getattr(transformers, name)._from_config(config, attn_implementation=attention, dtype=torch.bfloat16).cuda(); m.config.use_cache = False; m.train()
    own = {p.untyped_storage().data_ptr() for p in m.parameters()}; saved = {}
    def pack(t):
        if t.untyped_storage().data_ptr() not in own: saved[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t.dtype); kept.append(t)
        return t
    kept, x = [], torch.randint(3, 100, (2, 64)).cuda(); forward, backward = Launches(), Launches()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), forward: loss = m(input_ids=x, labels=x[:, 0] % 2 if "Classification" in name else x).loss
    with backward: loss.backward()
    by = collections.Counter()
    for n, dtype in saved.values(): by[str(dtype).removeprefix("torch.")] += n
    return by, forward.names, backward.names


if __name__ == "__main__":
    less = lambda b, a: {k: b[k] - a[k] for k in sorted(b) if b[k] != a[k]}
    for attention in ("sdpa", "eager"):
        for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "configs", "*.json"))):
            fields = json.load(open(path))
            try: two, three = (count(fields, attention, layers) for layers in (2, 3))
            except ValueError: continue  # The class does not support it.
            saved, forward, backward = (less(b, a) for a, b in zip(two, three))
            print(json.dumps(dict(config=os.path.basename(path)[:-5], attention=attention, bfloat16=saved.get("bfloat16", 0), float32=saved.get("float32", 0), bool=saved.get("bool", 0),
                                  forward=forward, backward=backward)), flush=True)
