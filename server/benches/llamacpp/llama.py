"""Writes Llama models with random weights in the shapes of `tidegate bench`, as GGUF files in f16.

    python llama.py 12m 125m

llama-quantize turns them into other types. Needs numpy and gguf.
"""

import sys

import gguf
import numpy

VOCABULARY = 32_000
RANDOM = numpy.random.default_rng(20261129)


def matrix(rows, columns, gain=1.0):
    return (RANDOM.standard_normal((rows, columns), numpy.float32) * gain * columns**-0.5).astype(numpy.float16)


def llama(file, layers, hidden, heads, inner):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    # Three special tokens, all bytes, and words that no text has.
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += [f"▁word{i}" for i in range(VOCABULARY - len(words))]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(VOCABULARY)])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (VOCABULARY - len(kinds)))
    # The head is the embedding, as in the shapes of Tidegate.
    writer.add_tensor("token_embd.weight", matrix(VOCABULARY, hidden))
    ones = numpy.ones(hidden, numpy.float32)
    writer.add_tensor("output_norm.weight", ones)
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{i}.{part}.weight", matrix(hidden, hidden))
        for part in ("ffn_gate", "ffn_up"):
            writer.add_tensor(f"blk.{i}.{part}.weight", matrix(inner, hidden))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", matrix(hidden, inner, 0.5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SHAPES = {"12m": (6, 256, 4, 704), "125m": (12, 768, 12, 2048)}

for name in sys.argv[1:]:
    llama(f"llama-{name}-f16.gguf", *SHAPES[name])
