"""What a user does with a loaded model, on one Llama that is compiled once."""

from __future__ import annotations

import copy
import pickle
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import BelowFloorError, ClosedError, InputError, ModelError, NotCopyableError
from tests.models.checkpoints import FAST, load_with_transformers, save_checkpoint, save_tokenizer

LENGTH = 64
PROMPT = "Once upon a time there was a lake"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def load(folder: Path, cache_dir: Path, budget: int | str | None = None, **options: Any) -> Any:
    return penstock.from_pretrained(
        folder,
        budget,
        **{
            "cache_length": LENGTH,
            "batch": 2,
            "device": "cpu",
            "cache_dir": cache_dir,
            "prefill_tokens": 24,
            "inductor_configs": FAST,
            "quiet": True,
            **options,
        },
    )


@pytest.fixture(scope="module")
def model(folder: Path, cache_dir: Path) -> Iterator[Any]:
    made = load(folder, cache_dir)
    made.set_budget(made.floor_bytes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_with_transformers(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _ids(count: int, rows: int = 1, seed: int = 5) -> Tensor:
    return torch.randint(3, 500, (rows, count), generator=torch.Generator().manual_seed(seed))


def test_it_is_the_real_class(model: Any, reference: Any) -> None:
    from transformers import LlamaForCausalLM

    assert isinstance(model, LlamaForCausalLM)
    assert model.config.to_dict() == reference.config.to_dict()
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert (model.device, model.dtype, model.main_input_name) == (torch.device("cpu"), torch.float32, "input_ids")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert model.can_generate() and not model.training


def test_figures(model: Any) -> None:
    assert model.budget_bytes == model.floor_bytes < model.weight_bytes
    # Keys and values, two layers, two rows, two heads of 16: 64 positions, and 7 for the padding of a last run.
    assert model.state_bytes == 2 * 2 * 2 * 2 * 16 * (LENGTH + 7) * 4
    assert model.cache_length == LENGTH
    model.generate(_ids(4), max_new_tokens=2)
    assert model.last_run.bytes_streamed > 0 and model.stats().runs >= 2 and model.link_bytes_per_s


def test_pipeline(model: Any, reference: Any, tokenizer: Any) -> None:
    import transformers

    made = [
        transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)(
            PROMPT, max_new_tokens=8, do_sample=False
        )
        for each in (reference, model)
    ]
    assert made[0] == made[1]
    assert made[0][0]["generated_text"].startswith(PROMPT)


def test_a_streamer_gets_tokens_as_they_come(model: Any, reference: Any, tokenizer: Any) -> None:
    from transformers import TextIteratorStreamer

    inputs = tokenizer(PROMPT, return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    worker = threading.Thread(
        target=model.generate, kwargs=dict(**inputs, streamer=streamer, max_new_tokens=8, do_sample=False)
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    wanted = reference.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(wanted)


def test_stopping_criteria_and_processors(model: Any, reference: Any) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    class Third(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9)

    class Odd(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, ::2] = -torch.inf
            return scores

    made = [
        each.generate(
            _ids(6),
            max_new_tokens=8,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Third()]),
            logits_processor=LogitsProcessorList([Odd()]),
        )
        for each in (reference, model)
    ]
    assert torch.equal(*made) and made[0].shape[1] == 9 and bool((made[0][:, 6:] % 2 == 1).all())


def test_several_turns_on_one_cache(model: Any, reference: Any) -> None:
    cache = model.new_cache()
    ids = _ids(7)
    runs = []
    for turn in range(3):
        before = model.stats().runs
        out = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        runs.append(model.stats().runs - before)
        assert torch.equal(out, reference.generate(ids, max_new_tokens=5, do_sample=False))
        assert cache.get_seq_length() == out.shape[1] - 1  # the last token was not run yet
        ids = torch.cat([out, _ids(4, seed=turn)], 1)
    assert runs == [5, 5, 5], "earlier turns are not run again"


def test_a_forward_gives_every_logit(model: Any, reference: Any) -> None:
    ids = _ids(13, rows=2)
    with torch.no_grad():
        want = reference(ids).logits
    got = model(ids).logits
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-4)
    assert torch.allclose(model(ids, logits_to_keep=3).logits, want[:, -3:], atol=1e-4)


def test_lookup_changes_no_bit(model: Any) -> None:
    """Also with more candidates than a run has rows. test_generation.py shows that it saves runs."""
    ids = _ids(6).repeat(1, 4)
    found = {}
    for lookup in (None, 3, 10):
        found[lookup] = model.generate(
            ids,
            max_new_tokens=20,
            do_sample=False,
            prompt_lookup_num_tokens=lookup,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert torch.equal(found[lookup].sequences, found[None].sequences)
        assert all(torch.equal(a, b) for a, b in zip(found[lookup].scores, found[None].scores, strict=True))


def test_a_cropped_cache_goes_on_as_if_nothing_had_been(model: Any) -> None:
    ids = _ids(9)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    cache = model.new_cache()
    model(ids[:, :5], past_key_values=cache)
    model(_ids(3, seed=9), past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False), plain)
    for wrong in (1, -100):
        with pytest.raises(InputError, match="crop takes from"):
            cache.crop(wrong)


def test_the_cache_is_full(model: Any) -> None:
    """Said before anything is run, and nothing is lost: the same cache goes on."""
    cache = model.new_cache()
    first = model.generate(_ids(20), past_key_values=cache, max_new_tokens=4, do_sample=False)
    runs, length = model.stats().runs, cache.get_seq_length()
    with pytest.raises(InputError, match=r"up to 124 tokens were asked for, and the cache holds 64; ask for fewer"):
        model.generate(first, past_key_values=cache, max_new_tokens=100)
    with pytest.raises(
        InputError, match=r"83 tokens do not fit into the cache of 64 \(23 are in it, 60 more were given\)"
    ):
        model(_ids(60), past_key_values=cache)
    assert (model.stats().runs, cache.get_seq_length()) == (runs, length)
    whole = model.generate(_ids(20), max_new_tokens=44, do_sample=False)
    assert whole.shape[1] == LENGTH, "the last token needs no place: it is not run"
    cache = model.new_cache()
    model.generate(_ids(20), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(first, past_key_values=cache, max_new_tokens=40, do_sample=False), whole)


def test_a_newer_cache_takes_the_place_of_an_older_one(model: Any) -> None:
    old = model.new_cache()
    model(_ids(4), past_key_values=old)
    model.new_cache()
    with pytest.raises(InputError, match="a newer cache of the same model took its place"):
        model(_ids(1), past_key_values=old)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(inputs_embeds=torch.zeros(1, 2, 64)), ModelError, "does not take inputs_embeds"),
        (dict(input_ids=_ids(3), output_attentions=True), ModelError, "does not take output_attentions"),
        (dict(input_ids=_ids(3), labels=_ids(3)), ModelError, "does not take labels"),
        (dict(input_ids=_ids(3), return_dict=False), ModelError, r"call to_tuple\(\) on what it returns"),
        (dict(input_ids=_ids(3), logits_to_keep=-1), ModelError, "logits_to_keep is -1; it must be the number"),
        (dict(), InputError, "input_ids are missing"),
        (
            dict(input_ids=_ids(3, rows=3)),
            InputError,
            r"3 rows of tokens; the program was compiled for up to 2 \(batch=\)",
        ),
        (
            dict(input_ids=_ids(3), position_ids=torch.tensor([[4, 5, 6]])),
            ModelError,
            "position_ids do not match attention_mask",
        ),
        (dict(input_ids=_ids(3), attention_mask=torch.ones(1, 7)), InputError, "attention_mask has 7 columns for 3"),
        (dict(input_ids=_ids(3), past_key_values=object()), InputError, r"make one with model.new_cache\(\)"),
    ],
)
def test_what_a_forward_refuses(model: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    runs = model.stats().runs
    with pytest.raises(error, match=text):
        model(**arguments)
    assert model.stats().runs == runs


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(num_beams=3), InputError, "load with batch=3"),
        (dict(use_cache=False), ModelError, "always uses its cache"),
        (dict(cache_implementation="static"), ModelError, "cache_implementation is 'static'; the cache is Penstock's"),
    ],
)
def test_what_generate_refuses(model: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        model.generate(_ids(3), max_new_tokens=2, **options)


def test_it_stays_where_it_is(model: Any) -> None:
    assert model.to("cpu") is model and model.to(torch.device("cpu")) is model and model.to(torch.float32) is model
    for way in (lambda: model.to("cuda"), lambda: model.to(torch.float16), model.half, lambda: model.to("meta")):
        with pytest.raises(ModelError, match="stays where and what it was loaded as"):
            way()


def test_it_cannot_be_copied(model: Any) -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError, match="cannot be copied or pickled"):
            way(model)


def test_every_budget_gives_the_same_bits(model: Any) -> None:
    """Also as bfloat16: test_bfloat16_is_identical_at_every_budget."""
    made = []
    for budget in (model.floor_bytes, model.weight_bytes // 2, model.weight_bytes * 2):
        model.set_budget(budget)
        made.append(model.generate(_ids(9), max_new_tokens=8, output_scores=True, return_dict_in_generate=True))
    model.set_budget(model.floor_bytes)
    assert all(torch.equal(a, b) for one in made[1:] for a, b in zip(made[0].scores, one.scores, strict=True))


def test_bfloat16_is_identical_at_every_budget(tmp_path: Path, cache_dir: Path) -> None:
    """And with prompt lookup, whose rows are those of every run."""
    folder = save_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    model = load(folder, cache_dir, batch=1)
    try:
        assert model.dtype == torch.bfloat16
        made = []
        for budget in (model.floor_bytes, model.weight_bytes * 2):
            model.set_budget(budget)
            for lookup in (None, 5):
                made.append(
                    model.generate(
                        _ids(5).repeat(1, 3),
                        max_new_tokens=12,
                        do_sample=False,
                        prompt_lookup_num_tokens=lookup,
                        output_scores=True,
                        return_dict_in_generate=True,
                    )
                )
        for one in made[1:]:
            assert torch.equal(one.sequences, made[0].sequences)
            assert all(torch.equal(a, b) for a, b in zip(made[0].scores, one.scores, strict=True))
    finally:
        model.close()


def test_an_interrupted_answer_leaves_the_model_usable(model: Any, reference: Any) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Interrupts(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(_ids(5), max_new_tokens=8, stopping_criteria=StoppingCriteriaList([Interrupts()]))
    want = reference.generate(_ids(5), max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(_ids(5), max_new_tokens=8, do_sample=False), want)


def test_below_the_floor(folder: Path, cache_dir: Path, model: Any) -> None:
    with pytest.raises(BelowFloorError, match="The KV cache and other state take .* a GPU needs about") as caught:
        load(folder, cache_dir, model.floor_bytes - 1)
    assert caught.value.floor_bytes == model.floor_bytes


def test_one_total_for_weights_cache_and_activations(folder: Path, cache_dir: Path, model: Any, reference: Any) -> None:
    """A refusal names one total, which is the one that is accepted."""
    with pytest.raises(BelowFloorError) as caught:
        load(folder, cache_dir, device_memory=0)
    terms = re.match(
        rf"device_memory is 0 B; the smallest for this program is (\d+) bytes: at least {model.floor_bytes} for "
        rf"weights, {model.state_bytes} for state and (\d+) for activations",
        str(caught.value),
    )
    # Behind them it says which placement needs less.
    assert terms is not None, str(caught.value)
    least, activations = map(int, terms.groups())
    assert least == model.floor_bytes + model.state_bytes + activations
    with pytest.raises(BelowFloorError):
        load(folder, cache_dir, device_memory=least - 1)
    made = load(folder, cache_dir, device_memory=least)
    assert made.budget_bytes == model.floor_bytes
    wanted, found = (each.generate(_ids(6), max_new_tokens=8, do_sample=False) for each in (reference, made))
    made.close()
    assert wanted.tolist() == found.tolist()


def test_a_second_start_compiles_nothing(
    folder: Path, cache_dir: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    again = load(folder, cache_dir, quiet=False)
    assert "compiling" not in capsys.readouterr().err
    try:
        assert torch.equal(again.generate(_ids(5), max_new_tokens=4), model.generate(_ids(5), max_new_tokens=4))
    finally:
        again.close()
    with pytest.raises(ClosedError):
        again.generate(_ids(5), max_new_tokens=4)


def test_a_shard_that_was_overwritten_makes_new_weights(
    folder: Path, cache_dir: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place, under the same name: the program stays, the weights are those of now."""
    other = save_checkpoint("llama", tmp_path / "other")
    for number in range(2):
        save_checkpoint("llama", other, seed=number)
        made = load(other, cache_dir, quiet=False)
        said = capsys.readouterr().err
        try:
            wanted = load_with_transformers(other).generate(_ids(5), max_new_tokens=6, do_sample=False)
            assert torch.equal(made.generate(_ids(5), max_new_tokens=6, do_sample=False), wanted)
        finally:
            made.close()
        assert "writing" in said and "compiling" not in said, "the folder's name is no part of a program"


def test_queue_of_requests_from_several_threads(model: Any, reference: Any) -> None:
    """One at a time, by a lock of the caller's: the answers are those of transformers."""
    found: queue.Queue[tuple[int, Tensor]] = queue.Queue()
    lock = threading.Lock()

    def ask(number: int) -> None:
        with lock:
            found.put((number, model.generate(_ids(6, seed=number), max_new_tokens=5, do_sample=False)))

    workers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for _ in workers:
        number, got = found.get()
        assert torch.equal(got, reference.generate(_ids(6, seed=number), max_new_tokens=5, do_sample=False))
