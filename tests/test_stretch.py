"""A model that is loaded with other rotary frequencies and more positions than it was made for."""

import pytest
import torch
from rich.progress import Progress
from tiny_models import gemma3, llama
from tiny_tokenizer import VOCABULARY, byte_tokenizer

from icecache.eval.decode import check_model, prefill
from icecache.eval.errors import EvalError
from icecache.eval.model import load_model

OLD, NEW = 256, 1024


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    llama(vocab_size=VOCABULARY, max_position_embeddings=OLD).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def frequencies(model):
    return model.model.rotary_emb.inv_freq


def test_a_stretched_model_reads_beyond_its_limit_with_other_frequencies(saved):
    plain, _ = load_model(saved)
    with pytest.raises(EvalError, match=f"{NEW} positions are needed, the model has {OLD}"):
        check_model(plain, NEW)
    model, _ = load_model(saved, rope_theta=300_000.0, max_positions=NEW)
    check_model(model, NEW)
    exponents = torch.arange(0, 16, 2) / 16  # head_dim 16
    torch.testing.assert_close(frequencies(plain), 10_000.0**-exponents)
    torch.testing.assert_close(frequencies(model), 300_000.0**-exponents)
    ids = torch.arange(NEW) % VOCABULARY
    assert prefill(model, ids.tolist(), Progress(disable=True)).length == NEW
    with torch.inference_mode():
        assert not torch.allclose(model(ids[None]).logits, plain(ids[None]).logits, atol=1e-2)


def test_each_option_alone(saved):
    longer, _ = load_model(saved, max_positions=NEW)
    assert longer.config.max_position_embeddings == NEW
    torch.testing.assert_close(frequencies(longer), frequencies(load_model(saved)[0]))
    other, _ = load_model(saved, rope_theta=5e5)
    assert other.config.max_position_embeddings == OLD
    assert other.config.rope_parameters["rope_theta"] == 5e5


def test_a_model_whose_layers_have_several_frequencies_is_refused(tmp_path):
    gemma3(vocab_size=VOCABULARY).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(EvalError, match="gemma3_text has no single rope_theta"):
        load_model(str(tmp_path), rope_theta=3e5)
