"""Compares the log probabilities of a running Tidegate server with those of llama.cpp on the same GGUF file.

    tidegate --model model.gguf --no-keep &
    pip install numpy llama-cpp-python
    python logprobs.py model.gguf http://127.0.0.1:8080

Both score the same random tokens: Tidegate one at a time, llama.cpp both in one batch and one at a time.
"""

import json
import random
import sys
import urllib.request

import llama_cpp as llama
import numpy as np

TOKENS = 201
file, url = sys.argv[1:3]


def by_tidegate(ids):
    body = json.dumps({"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return np.array(json.load(response)["choices"][0]["logprobs"]["token_logprobs"][1:])


def by_llama(model, ids, step):
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    context = llama.llama_init_from_model(model, params)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch, scores = llama.llama_batch_init(step, 0, 1), []
    for start in range(0, len(ids) - 1, step):
        batch.n_tokens = min(step, len(ids) - 1 - start)
        for i in range(batch.n_tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = ids[start + i], start + i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama.llama_decode(context, batch) == 0
        for i in range(batch.n_tokens):
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocab,)).astype(np.float64)
            most = logits.max()
            scores.append(logits[ids[start + i + 1]] - most - np.log(np.exp(logits - most).sum()))
    llama.llama_free(context)
    return np.array(scores)


llama.llama_backend_init()
model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
draw = random.Random(1)
ids = [draw.randrange(1, 50_000) for _ in range(TOKENS)]
ours, batch, single = by_tidegate(ids), by_llama(model, ids, TOKENS - 1), by_llama(model, ids, 1)


def differ(what, a, b):
    distance = np.abs(a - b)
    print(f"{what}: mean {distance.mean():.6f}, greatest {distance.max():.6f} nats")


print(f"{TOKENS - 1} tokens; log probabilities from {ours.min():.2f} to {ours.max():.2f}, standard deviation {ours.std():.2f}")
differ("Tidegate and llama.cpp, token by token", ours, single)
differ("Tidegate and llama.cpp, in one batch", ours, batch)
differ("llama.cpp with itself, the two ways", single, batch)
