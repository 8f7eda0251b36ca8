"""The probe exports the queries, keys and values of a softmax model's layers."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tidegate_experiments.__main__ import main
from tidegate_experiments.probe import heads, windows
from tidegate_training.data import EOT, train_tokenizer
from tidegate_training.export import write_folder
from tidegate_training.fixtures import BASE, LINES
from tidegate_training.model import Decoder
from tidegate_training.randomise import randomise


def softmax_model(vocab: int, **changes) -> Decoder:
    keys = dict(attention="softmax", gate=False, proj_dim=0, sliding_window=64, position_embedding="rope", vocab_size=vocab)
    model = Decoder(dataclasses.replace(BASE, **(keys | changes))).eval()
    randomise(model, torch.Generator().manual_seed(5))
    return model


def test_q_k_and_v_give_the_outputs_of_the_layer():
    model = softmax_model(97)
    ids = torch.randint(1, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    layer, outputs = model.model.layers[1].self_attn, []
    handle = layer.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    found = heads(model, ids)
    handle.remove()
    assert [tuple(found[name].shape) for name in "qkv"] == [(6, 2, 20, 8)] * 3
    for case in range(3):
        at = case * 2 + 1  # the second of two layers
        out = F.scaled_dot_product_attention(found["q"][at], found["k"][at], found["v"][at], is_causal=True)
        assert torch.allclose(out.transpose(0, 1).flatten(1), outputs[0][case], atol=1e-5)
    assert "mix" not in vars(layer), "the probe restores the layer"


def test_windows_are_spaced_over_the_text():
    stream = torch.arange(100)
    found = windows(stream, 10, 4)
    assert found[:, 0].tolist() == [0, 30, 60, 90] and found[:, -1].tolist() == [9, 39, 69, 99]
    with pytest.raises(ValueError, match="4 times 30"):
        windows(stream, 30, 4)


def test_the_command_writes_the_file_and_refuses_other_models(tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text(("\n".join(LINES) + EOT) * 5, encoding="utf-8")
    train_tokenizer([str(lines)], 300, tmp_path / "tokenizer.json")
    arguments = ["--text", str(lines), "--tokens", "24", "--cases", "2", "--out", str(tmp_path / "out" / "qkv.safetensors")]
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    write_folder(softmax_model(vocab), tmp_path / "tokenizer.json", tmp_path / "softmax", "f32")
    assert main(["probe", "--model", str(tmp_path / "softmax"), *arguments]) == 0
    found = load_file(tmp_path / "out" / "qkv.safetensors")
    assert sorted(found) == ["k", "q", "v"] and tuple(found["q"].shape) == (4, 2, 24, 8)
    assert found["q"].std() > 0.1 and not torch.equal(found["q"], found["k"])
    rfa = Decoder(dataclasses.replace(BASE, vocab_size=vocab))
    write_folder(rfa, tmp_path / "tokenizer.json", tmp_path / "rfa", "f32")
    capsys.readouterr()
    assert main(["probe", "--model", str(tmp_path / "rfa"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "softmax attention is needed" in line
    del arguments[2:4]
    assert main(["probe", "--model", str(tmp_path / "softmax"), *arguments]) == 0
    assert load_file(tmp_path / "out" / "qkv.safetensors")["q"].shape[2] == 64  # the model's window
