"""Lists what autograd saves in, and which operators run in, one decoder layer of tiny transformers models: `saved.csv`.

    python3 saved.py > saved.csv        (torch 2.x and transformers 5 on a CPU)

Saved tensors are counted once per memory, without parameters, and by the layer during whose forward they are saved; `forward` and
`backward` count the operators that would launch a kernel on a GPU. Everything is the difference between a model of three and one of
two layers, in bfloat16, with a micro-batch of two sequences of 32 tokens, so the ends of the model cancel out."""
import collections, torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, vocab_size=100, max_position_embeddings=64)
CASES = [("llama", dict(tie_word_embeddings=True)), ("qwen3", dict(tie_word_embeddings=True)), ("mistral", dict(tie_word_embeddings=False, sliding_window=None)),
         ("gemma", dict(hidden_activation="gelu_pytorch_tanh"))]
VIEWS = {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "expand", "slice", "detach", "alias", "reshape", "permute", "squeeze", "select", "as_strided", "split", "empty", "empty_like",
         "new_empty", "new_empty_strided", "empty_strided", "lift_fresh", "_reshape_alias", "_local_scalar_dense", "scalar_tensor"}


class Launches(TorchDispatchMode):
    """Counts operators that are no views."""
    def __init__(self): super().__init__(); self.names = collections.Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS: self.names[name] += 1
        return func(*args, **(kwargs or {}))


def count(kind, over, layers):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | over | dict(num_hidden_layers=layers)))
    m = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16); m.config.use_cache = False; m.train()
    own = {p.untyped_storage().data_ptr() for p in m.parameters()}; saved = {}
    def pack(t):
        if t.untyped_storage().data_ptr() not in own: saved[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t.dtype); kept.append(t)
        return t
    kept, x = [], torch.randint(0, 100, (2, 32)); forward, backward = Launches(), Launches()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), forward: loss = m(input_ids=x, labels=x).loss
    with backward: loss.backward()
    by = collections.Counter()
    for n, dtype in saved.values(): by[str(dtype).removeprefix("torch.")] += n
    return by, forward.names, backward.names


print("model_type,saved_bfloat16,saved_float32,forward,backward,forward_ops,backward_ops")
for kind, over in CASES:
    (a, fa, ba), (b, fb, bb) = count(kind, over, 2), count(kind, over, 3)
    words = lambda c: " ".join(f"{k}:{v}" for k, v in sorted(c.items()) if v)
    f, back = {k: fb[k] - fa[k] for k in fb}, {k: bb[k] - ba[k] for k in bb}
    print(f"{kind},{b['bfloat16'] - a['bfloat16']},{b['float32'] - a['float32']},{sum(f.values())},{sum(back.values())},{words(f)},{words(back)}", flush=True)
