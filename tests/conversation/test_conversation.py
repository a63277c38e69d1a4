"""A conversation with its KV cache gives the same answers as one without, whatever happens between two turns."""

from functools import cache, partial
from typing import Any

import pytest
from helpers.models.chat_models import TEMPLATE, VOCABULARY, chat_model, chat_model_without_a_row, chat_tokenizer
from helpers.models.small_models import POSITIONS, small_model

import labkit
from labkit.conversation import Answer, ContextFullError, Conversation
from labkit.engine import InferenceEngine
from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import StepInput
from labkit.models.chat_template import end_of_turn
from labkit.models.tokenizer import END_OF_TEXT, byte_tokenizer

MESSAGES = ("hello, who are you?", "and what is that?", "why?")
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def engine(name: str, only_letters: bool = False) -> InferenceEngine:
    return labkit.init_inference(chat_model(name, only_letters=only_letters))


def without_a_cache(model: InferenceEngine, conversation: Conversation, new: int, **options: Any) -> list[int]:
    """Tokens of the answer to the last message, if the model reads the whole conversation anew."""
    ids = chat_tokenizer().apply_chat_template(
        conversation.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=END_OF_TEXT, **options)
    return out[0, ids.shape[1] :].tolist()


def spoil(cache: KVCache) -> None:
    """Overwrites the keys with NaN, as a step that did not finish may do."""
    assert isinstance(cache.heads, StoredHeads)
    for keys in cache.heads.keys:
        keys.fill_(float("nan"))


def ignore(text: str) -> None:
    pass


@pytest.mark.parametrize("only_letters", [True, False], ids=["letters", "made-up words"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_turns_with_the_cache_equal_answers_to_the_whole_conversation(name: str, only_letters: bool) -> None:
    """Holds even if the tokenizer splits an answer into other tokens than the model chose: the cache is cropped."""
    model = engine(name, only_letters)
    conversation = Conversation(model, chat_tokenizer(), system="be brief", new=9)
    for message in MESSAGES:
        answer = conversation.say(message, ignore)
        assert list(answer.tokens) == without_a_cache(model, conversation, 9)
        assert conversation.messages[-2:] == [
            {"role": "user", "content": message},
            {"role": "assistant", "content": answer.text},
        ]
        assert conversation.context == answer.context == answer.prompt_tokens + len(answer.tokens)


def test_a_turn_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn reads the last token of the previous answer, the end of that message, and the new message."""
    model, read = engine("llama", True), []
    begin = model.module.runner.begin

    def watched(step: Any) -> Any:
        read.append(step.shape[1])
        return begin(step)

    monkeypatch.setattr(model.module.runner, "begin", watched)
    conversation = Conversation(model, chat_tokenizer(), new=6)
    first = conversation.say("hello", ignore)
    assert read == [first.prompt_tokens, *[1] * (len(first.tokens) - 1)]
    read.clear()
    second = conversation.say("why?", ignore)
    assert read[0] == second.prompt_tokens - (first.context - 1)


def test_a_template_that_drops_earlier_answers_is_followed() -> None:
    dropping = TEMPLATE.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')")
    model, tokenizer = engine("llama"), chat_tokenizer(dropping)
    conversation = Conversation(model, tokenizer, new=7)
    for message in MESSAGES:
        answer = conversation.say(message, ignore)
    silent = [{**turn, "content": ""} if turn["role"] == "assistant" else turn for turn in conversation.messages]
    reference = Conversation(model, chat_tokenizer(), new=7)
    reference.messages = silent[:-2]
    assert reference.say(MESSAGES[-1], ignore).tokens == answer.tokens


def test_what_is_heard_is_the_answer_without_special_tokens() -> None:
    """The listener hears the text of an answer, also if the end-of-text token ends the answer."""
    model = engine("llama")
    heard: list[str] = []
    free = Conversation(model, chat_tokenizer(), new=9).say("hello", heard.append)
    assert (free.ended, "".join(heard)) == ("length", free.text)
    assert Conversation(model, chat_tokenizer(), new=9).say("hello").text == free.text

    heard.clear()
    ending = Conversation(model, chat_tokenizer(), new=9, forced_eos_token_id=END_OF_TEXT)
    ended = ending.say("hello", heard.append)
    assert (ended.ended, ended.tokens[-1], ended.tokens[:8]) == ("stop", END_OF_TEXT, free.tokens[:8])
    assert "".join(heard) == ended.text == chat_tokenizer().decode(free.tokens[:8])


@pytest.mark.parametrize("where", ["between two tokens", "within a step", "while the prompt is read"])
def test_an_interrupted_answer_stays_and_the_conversation_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard = engine("llama", True), []
    conversation = Conversation(model, chat_tokenizer(), new=9)
    conversation.say("hello", ignore)
    step, steps = model.module.runner._begin, []

    def interrupted(*args: Any) -> Any:
        steps.append(args)
        output = step(*args)
        if len(steps) == (1 if where == "while the prompt is read" else 4) and where != "between two tokens":
            spoil(args[0].cache)
            raise KeyboardInterrupt
        return output

    def listen(text: str) -> None:
        heard.append(text)
        if where == "between two tokens" and len(heard) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model.module.runner, "_begin", interrupted)
        answer = conversation.say("tell me a story", listen)
    assert answer.ended == "interrupted"
    assert list(answer.tokens) == without_a_cache(model, conversation, 9)[: len(answer.tokens)]
    assert len(answer.tokens) < 9
    assert "".join(heard) == answer.text == conversation.messages[-1]["content"]

    after = conversation.say("go on", ignore)
    assert list(after.tokens) == without_a_cache(model, conversation, 9)


def test_an_answer_ends_at_the_last_position_and_a_new_conversation_begins() -> None:
    conversation = Conversation(engine("gpt2", True), chat_tokenizer(), system="be brief", new=POSITIONS)
    first = conversation.say("hello", ignore)
    assert (first.ended, first.context) == ("length", POSITIONS)
    before = list(conversation.messages)
    with pytest.raises(ContextFullError, match=f"the model {POSITIONS} positions; begin a new conversation"):
        conversation.say("more", ignore)
    assert conversation.messages == before
    conversation.start_over()
    assert conversation.context == 0
    assert conversation.say("hello", ignore).tokens == first.tokens


def test_a_failed_turn_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine("llama")
    conversation = Conversation(model, chat_tokenizer(), new=5)
    conversation.say("hello", ignore)
    before = list(conversation.messages)
    with monkeypatch.context() as patched:
        patched.setattr(model.module.runner, "_begin", partial(_fail, model.module.runner._begin))
        with pytest.raises(FloatingPointError):
            conversation.say("why?", ignore)
    assert conversation.messages == before
    answer = conversation.say("why?", ignore)
    assert list(answer.tokens) == without_a_cache(model, conversation, 5)


def _fail(begin: Any, step: StepInput) -> None:
    begin(step)
    spoil(step.cache)
    raise FloatingPointError


def test_sampling_and_penalties_see_the_whole_conversation() -> None:
    """The cache spares the model the earlier turns, not the logits processors."""
    model = engine("llama", True)
    conversation = Conversation(model, chat_tokenizer(), new=9, repetition_penalty=3.0)
    for message in MESSAGES[:2]:
        answer = conversation.say(message, ignore)
        assert list(answer.tokens) == without_a_cache(model, conversation, 9, repetition_penalty=3.0)


@pytest.mark.parametrize("special", [True, False])
def test_the_token_with_which_the_template_ends_a_turn_ends_an_answer(*, special: bool) -> None:
    """Such a token ends an answer whatever its name and kind, even if the model's own settings do not list it. It is no
    part of the text.
    """
    tokenizer = byte_tokenizer(VOCABULARY - 1)
    tokenizer.chat_template = TEMPLATE.replace("eos_token", "'\\n[over]'")
    tokenizer.add_tokens(["[over]"], special_tokens=special)
    over = tokenizer.convert_tokens_to_ids("[over]")
    assert over not in (tokenizer.eos_token_id, END_OF_TEXT)
    conversation = Conversation(engine("llama"), tokenizer, new=9, sequence_bias={(over,): 1e4})
    heard: list[str] = []
    answer = conversation.say("hello", heard.append)
    assert (answer.tokens, answer.ended) == ((over,), "stop")
    assert "".join(heard) == answer.text == conversation.messages[-1]["content"] == ""


@pytest.mark.parametrize("template", ["{{ 1 }}", "{{ messages[0]['content'] }}", "{{ raise_exception('no') }}"])
def test_a_template_without_an_end_of_a_turn_adds_none(template: str) -> None:
    assert end_of_turn(chat_tokenizer(template)) is None


def test_a_model_with_hooks_reads_the_whole_conversation_at_each_turn() -> None:
    model = labkit.init_inference(chat_model_without_a_row())
    conversation = Conversation(model, chat_tokenizer(), new=9)
    assert (model.level, conversation.positions) == ("hooks", 256)
    for message in MESSAGES:
        answer = conversation.say(message, ignore)
        assert list(answer.tokens) == without_a_cache(model, conversation, 9)


def test_a_model_that_cannot_hold_a_conversation_is_refused() -> None:
    plain = chat_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*labkit generate continues a text with any model"):
        Conversation(engine("llama"), plain, new=5)
    with pytest.raises(TypeError, match="got LlamaForCausalLM, which has no KV cache of labkit's"):
        Conversation(small_model("llama"), chat_tokenizer(), new=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got new = 0"):
        Conversation(engine("llama"), chat_tokenizer(), new=0)


def test_a_template_that_takes_no_system_prompt_says_so() -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    conversation = Conversation(engine("llama"), chat_tokenizer(strict), system="be brief", new=5)
    with pytest.raises(ValueError, match=r"refuses the roles system, user \(no system role\); leave out a system"):
        conversation.say("hello", ignore)


@pytest.mark.parametrize("template", ["", "{# nothing #}"])
def test_a_template_that_writes_nothing_is_named(template: str) -> None:
    conversation = Conversation(engine("llama"), chat_tokenizer(template), new=5)
    with pytest.raises(ValueError, match="the model's chat template writes no token for the roles user; correct the"):
        conversation.say("hello", ignore)


def test_an_answer_says_how_fast_it_came() -> None:
    answer = Answer(5, (1, 2, 3), "x", "length", 7.0, (2.0, 4.0))
    assert (answer.per_token_ms, answer.context) == (3.0, 8)
    assert answer.tokens_per_s == pytest.approx(1e3 / 3.0)
    nothing = Answer(5, (), "", "interrupted", None, ())
    assert nothing.per_token_ms is nothing.tokens_per_s is None
