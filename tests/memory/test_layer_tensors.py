"""The tensors of a layer of each kind, against the published shapes."""

import torch

from r3lite.memory.known_models import INSTRUCT
from r3lite.memory.layer_tensors import layer_tensors, layers_by_taps


def test_the_layers_of_qwen35_have_the_shapes_of_its_checkpoint():
    config, _ = INSTRUCT["Qwen/Qwen3.5-0.8B"]
    assert layers_by_taps(config) == {4: 18, 0: 6}
    attention = layer_tensors(config, taps=0)
    assert attention.linears["q_proj"] == (2 * 8 * 256, 1024)  # a gate beside each query
    assert attention.linears["k_proj"] == (2 * 256, 1024)
    assert attention.norms == 2
    assert attention.others == (256, 256)  # norms of queries and keys
    rule = layer_tensors(config, taps=4)
    assert rule.linears["in_proj_qkv"] == (6144, 1024)
    assert rule.linears["in_proj_a"] == (16, 1024)
    assert sorted(rule.others) == [16, 16, 128, 6144 * 4]  # A_log and dt_bias, the norm's weight, the convolution


def test_reading_them_draws_no_random_numbers():
    config, _ = INSTRUCT["Qwen/Qwen2.5-0.5B-Instruct"]
    state = torch.get_rng_state()
    layer_tensors.cache_clear()
    assert layer_tensors(config, taps=0).biases == (896, 128, 128)
    assert torch.equal(torch.get_rng_state(), state)
