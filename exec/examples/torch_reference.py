"""Times attention and dense and grouped matmuls of torch at the shapes of the measured models, to compare with
`cuda_kernels time`: run both in one session on one machine. Prints the median of ten runs in microseconds."""
import torch, torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
def t(f, n=10):
    for _ in range(3): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        a=torch.cuda.Event(True); b=torch.cuda.Event(True); a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)*1e3)
    return sorted(ts)[len(ts)//2]
for (B,H,KV,S,D) in [(2,32,8,4096,64),(2,24,8,4096,128),(1,32,8,8192,128)]:
    q=torch.randn(B,S,H,D,device="cuda",dtype=torch.bfloat16).transpose(1,2).requires_grad_()
    k=torch.randn(B,S,KV,D,device="cuda",dtype=torch.bfloat16).transpose(1,2).requires_grad_()
    v=torch.randn(B,S,KV,D,device="cuda",dtype=torch.bfloat16).transpose(1,2).requires_grad_()
    for name,be in [("cudnn",SDPBackend.CUDNN_ATTENTION),("flash",SDPBackend.FLASH_ATTENTION)]:
        with sdpa_kernel(be):
            f=lambda: F.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True)
            try:
                o=f(); g=torch.randn_like(o)
                tf=t(f); tb=t(lambda: torch.autograd.grad(o,(q,k,v),g,retain_graph=True))
                print(f"torch sdpa {name} B{B} H{H} KV{KV} S{S} D{D}: fwd {tf:.1f} us bwd {tb:.1f} us")
            except Exception as e: print(name, "failed", str(e)[:100])
def mm(m,n,k,ta=False,tb=False):
    a=torch.randn((k,m) if ta else (m,k),device="cuda",dtype=torch.bfloat16); b=torch.randn((n,k) if tb else (k,n),device="cuda",dtype=torch.bfloat16)
    A=a.t() if ta else a; B=b.t() if tb else b
    x=t(lambda: A@B); print(f"torch mm m{m} n{n} k{k} ta{ta} tb{tb}: {x:.1f} us {2*m*n*k/x/1e6:.1f} TFLOP/s")
for c in [(8192,2048,2048,False,True),(8192,512,2048,False,True),(8192,8192,2048,False,True),(8192,2048,8192,False,True),(8192,128256,2048,False,True),(128256,2048,8192,True,False),(8192,2048,128256,False,False),(2048,8192,8192,True,False),(2048,2048,8192,True,False),(512,2048,8192,True,False)]: mm(*c)
# Experts of Qwen3-30B-A3B, Mixtral and gpt-oss: forward, input gradient, weight gradient.
for (n,k,e) in [(1536,2048,32),(2048,768,32),(28672,4096,8),(5760,2880,32)]:
    for rows in [256,512,1024,2048]:
        r=lambda *s: torch.randn(*s,device="cuda",dtype=torch.bfloat16)
        w,x,y=r(e,n,k),r(e*rows,k),r(e*rows,n); ends=torch.arange(rows,e*rows+1,rows,device="cuda",dtype=torch.int32)
        fs={"dense":lambda: x@w[0].t(),"forward":lambda: torch._grouped_mm(x,w.transpose(-2,-1),offs=ends),"rows":lambda: torch._grouped_mm(y,w,offs=ends),"weights":lambda: torch._grouped_mm(y.t(),x,offs=ends)}
        print(f"torch grouped_mm n{n} k{k} e{e}, {rows} rows each: "+", ".join(f"{name} {t(f):.1f} us" for name,f in fs.items()))
