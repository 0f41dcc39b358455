"""Writes nf4.json: what bitsandbytes (0.50.2, torch 2.15, CPU) makes of weights in NF4 with double
quantization: codes and scales in hexadecimal, the bits of factors and of the values it reads back.

Element i of a weight is ((i * 7919) % 1009 - 504) * (1 + i // 64 % 37) * unit, in float32.

Run: python3 nf4.py > nf4.json
"""

import json

import torch
from bitsandbytes import functional as F


def bits(x):
    return (x.contiguous().view(torch.int32).flatten().to(torch.int64) & 0xFFFFFFFF).tolist()


def case(rows, columns, unit):
    i = torch.arange(rows * columns)
    weight = ((i * 7919) % 1009 - 504).float() * (1 + i // 64 % 37).float() * unit
    stored, state = F.quantize_4bit(
        weight.view(rows, columns), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    read = F.dequantize_4bit(stored, state).flatten()
    return {
        "shape": [rows, columns],
        "unit": unit,
        "codes": bytes(stored.view(torch.uint8).flatten().tolist()).hex(),
        "scales": bytes(state.absmax.flatten().tolist()).hex(),
        "factors": bits(state.state2.absmax),
        "mean": bits(state.offset),
        "read": bits(read[::97]),
    }


# The last weight has more scales than share a factor.
cases = [case(8, 64, 2.0**-14), case(16, 48, 3.0), case(66, 256, 2.0**-12)]
print(json.dumps(cases, indent=0))
