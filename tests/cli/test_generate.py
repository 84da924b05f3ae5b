from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.eagle3 import write_head
from trt_kvcache.cli import generate as generate_module
from trt_kvcache.cli.console import size
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.session.session import InferenceSession

from .conftest import CACHE_NBYTES, CONFIG, GOLDEN, NO_GPU, SHIPPED, TOKEN_NBYTES, Run, change_json

REFERENCE = ("--engine", "reference")
PROMPT = "The rabbit-hole went straight"
CONTINUED = f"{PROMPT} on like a tunnel for some way, and then dipped suddenly down"


def test_one_prompt_is_continued(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "--prompt", PROMPT, "--max-new-tokens", 40)
    assert done.code == 0
    assert done.out.startswith(CONTINUED)
    assert done.out.count("\n") == 1, "text only, and a line end"


def test_statistics_are_one_line_on_stderr(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 7)
    assert done.err.count("\n") == 1
    assert done.err.startswith("ReferenceEngine on cpu: prefill 13 tokens in ")
    assert "; decode 6 tokens, " in done.err
    assert done.err.endswith(f"; cache {size(19 * TOKEN_NBYTES)} live of {size(512 * TOKEN_NBYTES)}\n")
    assert run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 7, "--no-stats").err == ""


def test_text_is_written_as_it_comes(run: Run, monkeypatch: pytest.MonkeyPatch):
    pieces: list[str] = []
    monkeypatch.setattr(generate_module, "put", pieces.append)
    run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 5)
    assert pieces[0] == PROMPT
    assert pieces[-1] == "\n"
    assert len(pieces) == 7


def test_several_prompts_are_written_one_after_another(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "-p", "Alice was beginning", "--prompt-ids", "0 5,9", "--max-new-tokens", 14)
    lines = done.out.splitlines()
    assert done.code == 0
    assert len(lines) == 3
    assert lines[0] == f"[0] {CONTINUED[: len(lines[0]) - 4]}"
    assert lines[1].startswith("[1] Alice was beginning to get very tired")
    assert lines[2].startswith("[2] 0 5 9")


def test_a_model_without_a_tokenizer_works_on_token_ids(run: Run):
    done = run("generate", GOLDEN / "llama", *REFERENCE, "--prompt-ids", "5,7,11", "--max-new-tokens", 4, "--ignore-eos")
    assert done.code == 0
    numbers = [int(part) for part in done.out.split()]
    assert numbers[:3] == [5, 7, 11]
    assert len(numbers) == 7


def test_text_needs_a_tokenizer(run: Run):
    done = run("generate", GOLDEN / "llama", *REFERENCE, "-p", "Alice")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: prompts[0]: expected token ids, got text. The model folder has no tokenizer.json.\n"


def test_options_reach_the_sampler(run: Run, monkeypatch: pytest.MonkeyPatch):
    seen: list[SamplingParams] = []

    def note(self: InferenceSession, prompts: Any, params: list[SamplingParams], **options: Any) -> Any:
        seen.extend(params)
        return iter(())

    monkeypatch.setattr(InferenceSession, "generate", note)
    options = ["--max-new-tokens", 3, "--temperature", 0.5, "--top-k", 4, "--top-p", 0.75, "--min-p", 0.125]
    options += ["--seed", 6, "--stop", ".", "--stop", "!", "--ignore-eos"]
    run("generate", SHIPPED, *REFERENCE, "-p", "A", *options)
    expected = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "seed": 6, "stop": (".", "!")}
    assert seen == [SamplingParams(**expected, ignore_eos=True)]
    seen.clear()
    run("generate", SHIPPED, *REFERENCE, "-p", "A", "-p", "B")
    assert seen == [SamplingParams(max_new_tokens=128)] * 2, "the model's own defaults hold for what was not given"


class TestSeeds:
    SAMPLED = ("--temperature", 2, "--max-new-tokens", 8)

    def test_drawn_seeds_are_shown_and_give_the_same_text_again(self, run: Run):
        first = run("generate", SHIPPED, *REFERENCE, "-p", "Alice", *self.SAMPLED)
        seed = first.err.splitlines()[0].removeprefix("seed: ")
        assert run("generate", SHIPPED, *REFERENCE, "-p", "Alice", *self.SAMPLED, "--seed", seed).out == first.out

    def test_each_prompt_has_its_own(self, run: Run):
        line = run("generate", SHIPPED, *REFERENCE, "-p", "Alice", "-p", "Alice", *self.SAMPLED).err.splitlines()[0]
        first, second = line.removeprefix("seeds: ").split(", ")
        assert first != second

    def test_none_is_shown_where_the_most_likely_token_is_taken(self, run: Run):
        assert "seed" not in run("generate", SHIPPED, *REFERENCE, "-p", "Alice", "--seed", 3, "--max-new-tokens", 2).err


class TestEcho:
    def test_a_continued_prompt_is_printed_unless_told_otherwise(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 9, "--no-echo")
        assert done.out == CONTINUED[len(PROMPT) :][: len(done.out) - 1] + "\n"

    def test_several_prompts(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--prompt-ids", "5", "--max-new-tokens", 2, "--no-echo")
        assert not done.out.startswith("[0] The")
        assert not done.out.splitlines()[1].startswith("[1] 5")


class TestChatTemplate:
    TEMPLATE = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if tools %}[{{ tools[0].name }}]{% endif %}{% if thinking is defined %}({{ thinking }}){% endif %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    @pytest.fixture
    def asked(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What the session is asked, as text where it was rendered by the template."""
        change_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=self.TEMPLATE))
        seen: list[Any] = []

        def note(session: InferenceSession, prompts: Any, params: Any, **options: Any) -> Any:
            assert session.tokenizer is not None
            seen.extend(p if isinstance(p, str) else session.tokenizer.decode(p, skip_special_tokens=False) for p in prompts)
            return iter([GeneratedToken(0, 7, "yes", "stop")])

        monkeypatch.setattr(InferenceSession, "generate", note)
        return seen

    def test_a_text_is_what_a_user_says(self, run: Run, model: Path, asked: list[Any]):
        done = run("generate", model, *REFERENCE, "-p", PROMPT)
        assert asked == [f"<user>{PROMPT}<assistant>"]
        assert done.out == "yes\n", "the answer alone"

    def test_raw_continues_it(self, run: Run, model: Path, asked: list[Any]):
        assert run("generate", model, *REFERENCE, "-p", PROMPT, "--raw").out == f"{PROMPT}yes\n"
        assert asked == [PROMPT]

    def test_echo_prints_the_question(self, run: Run, model: Path, asked: list[Any]):
        assert run("generate", model, *REFERENCE, "-p", PROMPT, "--echo").out == f"{PROMPT}yes\n"

    def test_token_ids_are_left_as_they_are(self, run: Run, model: Path, asked: list[Any]):
        assert run("generate", model, *REFERENCE, "--prompt-ids", "5 9").out == "5 9yes\n"
        assert "<user>" not in asked[0]

    def test_system_message_tools_and_arguments_reach_the_template(self, run: Run, model: Path, asked: list[Any], tmp_path: Path):
        (tmp_path / "tools.json").write_text('[{"name": "clock"}]')
        options = ["--system", "Be brief.", "--tools", tmp_path / "tools.json", "--template-arg", "thinking=false"]
        run("generate", model, *REFERENCE, "-p", "A", *options)
        assert asked == ["<system>Be brief.<user>A[clock](False)<assistant>"]

    def test_without_a_template_its_options_are_refused(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", "A", "--system", "x", "--template-arg", "a=1")
        assert (done.code, done.out) == (1, "")
        assert done.err == "error: --system, --template-arg: expected a model with a chat template, this one has none.\n"


class TestJson:
    def test_it_is_one_document(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--prompt-ids", "5,9", "--max-new-tokens", 3, "--json", "--seed", 4)
        document = json.loads(done.out)
        assert sorted(document) == ["answers", "device", "engine", "statistics"]
        first, second = document["answers"]
        assert list(first) == ["index", "prompt", "text", "tokens", "finish_reason", "seed"]
        assert (first["index"], first["prompt"], len(first["tokens"]), first["finish_reason"], first["seed"]) == (
            0,
            PROMPT,
            3,
            "length",
            None,
        )
        assert CONTINUED.startswith(PROMPT + first["text"])
        assert (second["index"], second["prompt"]) == (1, [5, 9])
        assert (document["engine"], document["device"], document["statistics"]["decode_tokens"]) == ("ReferenceEngine", "cpu", 4)
        assert "ReferenceEngine on cpu" in done.err, "all else goes to stderr"

    def test_a_drawn_seed_is_in_it(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 1, "--temperature", 1, "--json")
        assert isinstance(json.loads(done.out)["answers"][0]["seed"], int)

    def test_log_probabilities_are_in_it(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 3, "--json", "--logprobs", 2)
        (answer,) = json.loads(done.out)["answers"]
        assert [token["token"] for token in answer["logprobs"]] == answer["tokens"]
        assert all(token["logprob"] == token["top"][0][1] <= 0 for token in answer["logprobs"]), "greedy: the most likely one"
        assert all(len(token["top"]) == 2 for token in answer["logprobs"])

    def test_log_probabilities_need_it(self, run: Run):
        done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--logprobs", 2)
        assert (done.code, done.out) == (2, "")
        assert "Invalid value for --logprobs: expected --json with it" in done.complaint

    def test_nothing_is_printed_on_stdout_if_it_fails(self, run: Run):
        done = run("generate", GOLDEN / "llama", *REFERENCE, "-p", "Alice", "--json")
        assert (done.code, done.out) == (1, "")


#: What holds for options that are not given.
OFF = {"cuda_graphs": True, "max_embeddings": 0, "per_layer_table": "device", "prefill_chunk": 256, "prompt_cache_bytes": 0}


def test_options_reach_the_session(run: Run, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def note(folder: Path, **options: Any) -> Any:
        seen.update(options, folder=folder)
        raise OSError("that is enough")

    monkeypatch.setattr(InferenceSession, "from_model", note)
    sizes = ["--max-batch-size", 3, "--max-sequence-length", 99, "--dtype", "float32", "--attention", "mask", "--flavour", "tensorrt_rtx"]
    sizes += ["--plugin-layers", "segments"]
    run("generate", SHIPPED, *REFERENCE, "-p", "A", *sizes)
    assert callable(seen.pop("progress"))
    expected = {"max_batch_size": 3, "max_sequence_length": 99, "dtype": "float32", "attention": "mask", "flavour": "tensorrt_rtx"}
    expected["plugin_layers"] = "segments"
    assert seen == {**expected, "engine": "numpy", "device": 0, "folder": SHIPPED, **OFF}
    seen.clear()
    run("generate", SHIPPED, "-p", "A", "-p", "B")
    assert callable(seen.pop("progress"))
    assert seen == {"max_batch_size": 2, "engine": "auto", "flavour": "auto", "device": 0, "folder": SHIPPED, **OFF}


def test_a_saved_sequence_is_continued(run: Run, tmp_path: Path):
    saved = tmp_path / "one.kv"
    first = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-new-tokens", 4, "--save-snapshot", saved)
    assert (first.out + run("generate", SHIPPED, *REFERENCE, "--resume", saved, "--max-new-tokens", 3).out).replace("\n", "") in CONTINUED


def test_the_same_seed_gives_the_same_text(run: Run):
    def text(seed: int) -> str:
        return run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--temperature", 1.5, "--seed", seed, "--max-new-tokens", 20).out

    assert text(1) == text(1) != text(2)


def test_a_stop_text_ends_the_output(run: Run):
    assert run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--stop", " for some").out == f"{PROMPT} on like a tunnel\n"


def test_a_full_cache_ends_the_text_with_a_warning(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "-p", "Alice", "--max-sequence-length", 16, "--max-new-tokens", 8)
    assert done.code == 0
    assert done.err.splitlines()[0] == "warning: the cache is full: --max-sequence-length=16 ended the text of slot 0."
    assert done.out.splitlines()[0].startswith(f"[0] {PROMPT} on")
    assert "warning" not in run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-sequence-length", 16, "--max-new-tokens", 3).err


def test_a_prompt_longer_than_the_cache(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--max-sequence-length", 11)
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: prompt 0 has 13 tokens; that exceeds --max-sequence-length=11. Nothing was changed.\n"


def test_ctrl_c_keeps_what_was_written(run: Run, monkeypatch: pytest.MonkeyPatch):
    class Interrupted:
        def __init__(self, events: Any) -> None:
            self.events = events
            self.left = 3

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return next(self.events)

    generate = InferenceSession.generate
    monkeypatch.setattr(InferenceSession, "generate", lambda *arguments, **options: Interrupted(generate(*arguments, **options)))
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT)
    assert (done.code, done.err) == (130, "interrupted\n")
    assert done.out == f"{PROMPT} on like\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "expected --prompt or --prompt-ids, got neither."),
        (["--prompt-ids", ""], "Invalid value for --prompt-ids: expected integers such as 1,2,3, got ''."),
        (["--prompt-ids", "1,a"], "Invalid value for --prompt-ids: expected integers such as 1,2,3, got '1,a'."),
        (["--prompt", "\udcff"], "Invalid value for --prompt: expected UTF-8, got '\\udcff'."),
        (["-p", "A", "--max-new-tokens", 0], "Invalid value for '--max-new-tokens'"),
        (["-p", "A", "--max-new-tokens", "x"], "Invalid value for '--max-new-tokens'"),
        (["-p", "A", "--temperature", "nan"], "Invalid value for --temperature: expected a finite number, at least 0, got nan."),
        (["-p", "A", "--temperature", "-1"], "Invalid value for --temperature: expected a finite number, at least 0, got -1.0."),
        (["-p", "A", "--top-p", 0], "Invalid value for --top-p: expected 0 < top_p <= 1, got 0.0."),
        (["-p", "A", "--min-p", 1], "Invalid value for --min-p: expected 0 <= min_p < 1, got 1.0."),
        (["-p", "A", "--top-k", -1], "Invalid value for '--top-k'"),
        (["-p", "A", "--seed", 2**63], "Invalid value for --seed: expected an integer from 0 to 9223372036854775807"),
        (["-p", "A", "--stop", ""], "Invalid value for --stop: expected texts that are not empty, got ''."),
        (["-p", "A", "--resume", "one.kv"], "Error: expected prompts or --resume, got both."),
        (["--prompt-ids", "1", "--resume", "one.kv"], "Error: expected prompts or --resume, got both."),
        (["-p", "A", "-p", "B", "--save-snapshot", "one.kv"], "Invalid value for --save-snapshot: expected one prompt or --resume, got 2."),
        (
            ["--resume", "one.kv", "--resume", "two.kv", "--save-snapshot", "both.kv"],
            "Invalid value for --save-snapshot: expected one prompt or --resume, got 2.",
        ),
    ],
    ids=str,
)
def test_wrong_usage_before_the_model_is_opened(run: Run, arguments: list[object], complaint: str):
    done = run("generate", "no/such/folder", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("nope/x.kv", "{0}/nope: No such file or directory."), (".", "{0}: Is a directory."), ("file/x.kv", "Not a dir")],
)
def test_a_snapshot_that_cannot_be_written_is_refused_before_the_first_token(run: Run, tmp_path: Path, name: str, complaint: str):
    (tmp_path / "file").touch()
    done = run("generate", SHIPPED, "-p", "A", "--save-snapshot", tmp_path / name)
    assert (done.code, done.out) == (1, "")
    assert complaint.format(tmp_path) in done.complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompt-ids", f"1,{CONFIG.vocab_size}"], f"prompts[0][1]: expected an integer from 0 to {CONFIG.vocab_size - 1}, got "),
        (["--prompt-ids", "-1"], f"prompts[0][0]: expected an integer from 0 to {CONFIG.vocab_size - 1}, got -1."),
        (["-p", "A", "--max-sequence-length", 513], "--max-sequence-length: expected at most 512"),
        (["-p", "A", "--max-batch-size", 10**30], "max_batch_size: expected an integer from 1 to 65535"),
    ],
    ids=str,
)
def test_prompts_and_sizes_that_do_not_fit_are_refused(run: Run, arguments: list[object], complaint: str):
    done = run("generate", SHIPPED, *REFERENCE, *arguments)
    assert (done.code, done.out) == (1, "")
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_more_prompts_than_slots_take_turns(run: Run):
    arguments = ["generate", SHIPPED, *REFERENCE, "-p", "Alice was", "-p", "The", "--max-new-tokens", 4]
    assert run(*arguments, "--max-batch-size", 1).out == run(*arguments).out != ""


def test_an_empty_prompt_is_the_begin_token_alone(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", "", "--max-new-tokens", 5)
    assert done.code == 0
    assert done.out.strip()
    assert "prefill 1 token in" in done.err


@pytest.mark.usefixtures("without_gpu")
class TestEngines:
    def test_the_fallback_to_the_reference_engine_is_warned_of_once(self, run: Run):
        for _ in range(2):  # on every run, although Python shows a warning of one place once
            done = run("generate", SHIPPED, "-p", PROMPT, "--max-new-tokens", 4)
            assert done.code == 0
            assert done.out.startswith(CONTINUED[: len(done.out) - 1])
            assert done.err.count("warning:") == 1
            assert done.err.startswith(f"warning: running the NumPy reference engine: {NO_GPU}; torch is not installed.\n")

    def test_the_reference_engine_by_name_does_not_warn(self, run: Run):
        assert "warning" not in run("generate", SHIPPED, *REFERENCE, "-p", "A", "--max-new-tokens", 4).err

    def test_tensorrt_by_name_fails_without_a_gpu(self, run: Run, engine: Path):
        done = run("generate", engine, "--engine", "tensorrt", "-p", "A")
        assert (done.code, done.out) == (1, "")
        assert done.err == f"error: CudaMemory: {NO_GPU}.\n"

    def test_an_engine_folder_runs_on_the_reference_engine(self, run: Run, engine: Path):
        done = run("generate", engine, "-p", PROMPT, "--max-new-tokens", 7)
        assert done.code == 0
        assert CONTINUED.startswith(done.out.rstrip("\n"))
        assert done.err.splitlines()[1].endswith(f" of {size(CACHE_NBYTES)}")


@pytest.mark.parametrize(
    "option",
    [
        ("--max-batch-size", 2),
        ("--max-sequence-length", 9),
        ("--dtype", "float16"),
        ("--attention", "mask"),
        ("--plugin-layers", "segments"),
    ],
    ids=str,
)
def test_options_that_an_engine_folder_fixes_are_refused(run: Run, engine: Path, option: tuple[str, object]):
    done = run("generate", engine, *REFERENCE, "-p", "A", *option)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: {option[0]}: expected with a Hugging Face folder only; {engine} is an engine folder, built with its own.\n"


def test_drafts_change_no_text_and_are_counted(run: Run):
    prompt = "the Hatter, said the Hatter, said the Hatter, said"
    plain = run("generate", SHIPPED, *REFERENCE, "-p", prompt, "-n", 200, "--ignore-eos", "--json")
    done = run("generate", SHIPPED, *REFERENCE, "-p", prompt, "-n", 200, "--ignore-eos", "--json", "--draft", "ngram")
    found, expected = json.loads(done.out), json.loads(plain.out)
    assert found["answers"] == expected["answers"]
    counts = found["statistics"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["acceptance_rate"] == counts["accepted_tokens"] / counts["draft_tokens"]
    assert counts["mean_acceptance_length"] == 1 + counts["accepted_tokens"] / counts["drafts"]
    assert counts["decode_steps"] == expected["statistics"]["decode_steps"] - counts["accepted_tokens"]
    assert f", {counts['accepted_tokens']} of {counts['draft_tokens']} draft tokens accepted; cache " in done.err
    assert "draft" not in plain.err


def test_drafts_of_an_eagle3_head(run: Run, tmp_path: Path):
    """One of random weights, few of whose drafts are accepted; `bench` takes it too."""
    head = write_head(tmp_path / "head", SHIPPED, tokens=range(200), eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    plain = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "-n", 30, "--ignore-eos", "--json")
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "-n", 30, "--ignore-eos", "--json", "--draft", head)
    found = json.loads(done.out)
    assert found["answers"] == json.loads(plain.out)["answers"]
    assert found["statistics"]["draft_tokens"] > 0
    [row] = json.loads(run("bench", SHIPPED, *REFERENCE, "--runs", 2, "-p", 0, "-n", 30, "--json", "--draft", head).out)["rows"]
    assert row["draft_tokens"] > 0


def test_a_draft_model_that_is_not_there_fails(run: Run):
    done = run("generate", SHIPPED, *REFERENCE, "-p", PROMPT, "--draft", "eagle")
    assert done.code == 1
    assert "eagle: expected a model folder" in done.err
