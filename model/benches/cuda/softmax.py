"""The baseline for RFA: a Llama-like decoder of the same shape with softmax attention, in PyTorch.

It uses bf16, random weights, a static KV cache filled with random numbers, `scaled_dot_product_attention` with the fastest
backend at each length that a CUDA graph can record, fused projections, and one CUDA graph per length. It has no rotary
embeddings, which would only make it slower. A step reads one token per row at the last position of the cache and attends to
the whole cache; its logits stay on the device.

    python3 softmax.py                    measures everything by itself, one line of JSON per result
    python3 softmax.py --serve            runs one command per line, as model/benches/cuda/beside.rs sends them

The only dependency is torch.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = {
    "layers": 24, "hidden": 2048, "heads": 32, "intermediate": 5504, "vocabulary": 32_000, "batch": 16,
    "lengths": [512, 1024, 2048, 4096, 8192, 16_384, 32_768], "prompt": 8192, "device": "cuda",
}
SECONDS = 0.06  # approximate length of one measurement
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def say(text):
    print(f"softmax.py: {text}", file=sys.stderr, flush=True)


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def once(device, run, times):
    """Returns the mean seconds per call over `times` calls."""
    sync(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    sync(device)
    return (time.perf_counter() - start) / times


def pace(device, run):
    """Returns the number of repetitions for one measurement, after a warm-up."""
    once(device, run, 1)
    return max(2, min(2000, int(SECONDS / once(device, run, 2))))


class Model:
    def __init__(self, shape):
        self.__dict__.update(shape)
        self.head_dim = self.hidden // self.heads
        torch.manual_seed(1)

        def weight(outs, ins):
            return (torch.randn(outs, ins, device=self.device) * ins**-0.5).to(torch.bfloat16)

        def ones():
            return torch.ones(self.hidden, device=self.device, dtype=torch.bfloat16)

        self.table = weight(self.vocabulary, self.hidden)  # (vocabulary, hidden): also the output head
        self.blocks = [
            {
                "norm": ones(),
                "qkv": weight(3 * self.hidden, self.hidden),
                "out": weight(self.hidden, self.hidden),
                "mlp_norm": ones(),
                "gate_up": weight(2 * self.intermediate, self.hidden),
                "down": weight(self.hidden, self.intermediate),
            }
            for _ in range(self.layers)
        ]
        self.norm = ones()
        self.ids = torch.randint(self.vocabulary, (self.batch, 1), device=self.device)
        self.text = torch.randint(self.vocabulary, (1, self.prompt), device=self.device)
        self.room = max(self.lengths)
        self.caches = self.random_cache()
        self.steps = {}  # by length: the step, its repetitions per measurement, the graph's logits
        self.prompt_backend = None

    def random_cache(self):
        """Random keys and values of each layer (batch, heads, capacity, head_dim). Halves the capacity until they fit."""
        while True:
            shape = (self.batch, self.heads, self.room, self.head_dim)
            try:
                draw = lambda: torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_()
                return [(draw(), draw()) for _ in range(self.layers)]
            except torch.OutOfMemoryError:
                if self.room <= min(self.lengths):
                    raise
                self.room //= 2
                torch.cuda.empty_cache()
                say(f"there is memory for {self.room} tokens alone")

    def forward(self, ids, cached, causal):
        """ids (rows, time) -> logits of the last token (rows, vocabulary).

        cached(layer, k, v) stores (rows, heads, time, head_dim) and returns the keys and values to attend to."""
        rows, tokens = ids.shape
        x = self.table[ids]
        for layer, block in enumerate(self.blocks):
            h = F.rms_norm(x, (self.hidden,), block["norm"], 1e-5)
            qkv = F.linear(h, block["qkv"]).view(rows, tokens, 3, self.heads, self.head_dim)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            k, v = cached(layer, k, v)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            x = x + F.linear(h.transpose(1, 2).reshape(rows, tokens, self.hidden), block["out"])
            h = F.rms_norm(x, (self.hidden,), block["mlp_norm"], 1e-5)
            gate, up = F.linear(h, block["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, block["down"])
        return F.linear(F.rms_norm(x[:, -1], (self.hidden,), self.norm, 1e-5), self.table)

    @torch.no_grad()
    def by_speed(self, q, k, v, causal):
        """Returns the backends that support one layer's attention, fastest first."""
        seconds = {}
        for name, backend in BACKENDS.items():
            if name == "math" and self.device == "cuda":
                continue  # it would write a long prompt's attention matrix to memory
            run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            try:
                with sdpa_kernel(backend):
                    run()
                    seconds[name] = min(once(self.device, run, 5) for _ in range(3))
            except RuntimeError:
                continue  # does not support this shape, or is not built in
        if not seconds:
            raise RuntimeError("no backend of scaled_dot_product_attention supports this shape")
        return sorted(seconds, key=seconds.get)

    def recorded(self, step):
        """Records a step as a CUDA graph -> the function that replays it, and its logits (rows, vocabulary)."""
        # torch.cuda.graph requires a warm-up on a separate stream.
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            step()
            step()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                logits = step()
        finally:
            # A failed recording may leave its stream current.
            torch.cuda.set_stream(before)
        return graph.replay, logits

    @torch.no_grad()
    def prepare(self, length):
        """Records a step at a cache length -> the name of its attention backend."""
        if length > self.room:
            raise RuntimeError(f"not enough memory for a cache of {length} tokens")

        def cached(layer, k, v):
            keys, values = self.caches[layer]
            keys[:, :, length - 1 : length] = k
            values[:, :, length - 1 : length] = v
            return keys[:, :, :length], values[:, :, :length]

        keys, values = self.caches[0]
        q = torch.randn(self.batch, self.heads, 1, self.head_dim, device=self.device).to(torch.bfloat16)
        step = lambda: self.forward(self.ids, cached, False)
        why = None
        for backend in self.by_speed(q, keys[:, :, :length], values[:, :, :length], False):
            try:
                with sdpa_kernel(BACKENDS[backend]):
                    run, logits = self.recorded(step) if self.device == "cuda" else (step, None)
                    self.steps[length] = (run, pace(self.device, run), logits)
                return backend
            except RuntimeError as error:  # a fast backend may not support recording
                why = f"{backend}: {error}"
                say(f"{length} tokens: {why}")
        raise RuntimeError(f"no backend's step of {length} tokens could be recorded, the last: {why}")

    @torch.no_grad()
    def decode(self, length):
        """Returns the seconds per step."""
        run, times, logits = self.steps[length]
        seconds = once(self.device, run, times)
        if logits is not None and not torch.isfinite(logits).all():
            raise RuntimeError("a step gave NaN logits")
        return seconds

    @torch.no_grad()
    def prefill(self):
        """Returns the seconds for a prompt whose keys and values are written to the first row of the cache."""
        room = min(self.prompt, self.room)

        def cached(layer, k, v):
            for cache, new in zip(self.caches[layer], (k, v)):
                cache[:1, :, :room] = new[:, :, :room]
            return k, v

        if self.prompt_backend is None:
            q = torch.randn(1, self.heads, self.prompt, self.head_dim, device=self.device).to(torch.bfloat16)
            self.prompt_backend = self.by_speed(q, q, q, True)[0]
        with sdpa_kernel(BACKENDS[self.prompt_backend]):
            return once(self.device, lambda: self.forward(self.text, cached, True), 1)


def limits(device):
    """Measures the FLOP/s of a matrix product and the bytes/s of a copy, reads plus writes."""
    side = 8192 if device == "cuda" else 256
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = lambda: torch.matmul(a, b, out=out)
    times = pace(device, product)
    products = sorted(2 * side**3 / once(device, product, times) for _ in range(5))
    source = torch.randint(256, (1 << (30 if device == "cuda" else 20),), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)
    times = pace(device, copy)
    copies = sorted(2 * source.numel() / once(device, copy, times) for _ in range(5))
    ends = lambda numbers: {"median": statistics.median(numbers), "least": numbers[0], "most": numbers[-1]}
    return {"product_side": side, "product": ends(products), "copy": ends(copies), "torch": torch.__version__}


def answer(model, request):
    what = request["do"]
    if what == "limits":
        return limits(model.device)
    if what == "prepare":
        length = request["length"]
        bytes_ = 2 * 2 * model.layers * model.hidden * length
        return {"length": length, "backend": model.prepare(length), "cache_bytes": bytes_}
    if what == "decode":
        return {"length": request["length"], "seconds": model.decode(request["length"])}
    if what == "prefill":
        return {"tokens": model.prompt, "seconds": model.prefill(), "backend": model.prompt_backend}
    raise ValueError(f"do: {what} is not known")


def write(line):
    print(json.dumps(line), flush=True)


def serve(model):
    write({"ready": True, "room": model.room, "torch": torch.__version__})
    for line in sys.stdin:
        try:
            write(answer(model, json.loads(line)))
        except Exception as error:  # reported to the caller, who continues
            write({"error": f"{type(error).__name__}: {error}"})


def alone(model, rounds=5):
    write({"what": "torch", **limits(model.device)})
    for length in (length for length in model.lengths if length <= model.room):
        backend = model.prepare(length)
        ms = sorted(1e3 * model.decode(length) for _ in range(rounds))
        line = {"ms": statistics.median(ms), "least": ms[0], "most": ms[-1], "rounds": rounds, "backend": backend}
        write({"what": "softmax", "batch": model.batch, "length": length, **line})
    model.prefill()
    seconds = sorted(model.prefill() for _ in range(rounds))
    ends = {"seconds": statistics.median(seconds), "least": seconds[0], "most": seconds[-1], "rounds": rounds}
    write({"what": "softmax prefill", "tokens": model.prompt, "backend": model.prompt_backend, **ends})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: others than " + json.dumps(SHAPE))
    args = parser.parse_args()
    shape = {**SHAPE, **args.shape}
    try:
        model = Model(shape)
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    (serve if args.serve else alone)(model)


if __name__ == "__main__":
    main()
