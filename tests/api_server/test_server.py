"""`headwise serve`: OpenAI's own client, the numbers of hw.generate, and what is refused."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

import headwise as hw
from headwise.api_server.request_fields import ChatMessage, ChatTemplate, read_chat_template
from headwise.api_server.server import MAX_BODY_BYTES, ApiSecurity, ApiServer, ServedModel, ServeOptions, serve
from headwise.cli.run import attach_tokenizer
from headwise.models import Transformer

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}<assistant>{% endif %}"
CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def language_model() -> Transformer:
    net = hw.build(hw.families.read_model_spec(CONFIG | {"num_hidden_layers": 2, "vocab_size": 256}), seed=3)
    for parameter in net.parameters():  # so that outputs of temperature 0 are not one token again and again
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    attach_tokenizer(net, "bytes")
    return net.eval()


@pytest.fixture(scope="module")
def net() -> Transformer:
    return language_model()


@contextmanager
def running(model: ServedModel, options: ServeOptions) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    started, servers, addresses = threading.Event(), list[uvicorn.Server](), list[str]()

    class StoppableServer(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    def announce(address: str) -> None:
        addresses.append(address)
        started.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", StoppableServer)
        thread = threading.Thread(target=serve, args=(model, options, announce))
        thread.start()
        assert started.wait(30)
        yield addresses[0]
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(net: Transformer) -> Iterator[openai.OpenAI]:
    model = ServedModel("small", hw.Engine(net, budget=4_000_000), ChatTemplate(TEMPLATE))
    with running(model, ServeOptions(port=0, api_key="secret")) as address:
        yield openai.OpenAI(base_url=address, api_key="secret", max_retries=0)


def test_completions_are_those_of_generate(client: openai.OpenAI, net: Transformer):
    answer = client.completions.create(model="small", prompt="Once upon", max_tokens=12, temperature=0, top_p=1)
    assert answer.choices[0].text == hw.generate(net, "Once upon", max_new_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 12)
    sampled = client.completions.create(model="small", prompt="Once upon", max_tokens=12, temperature=0.8, seed=7)
    assert sampled.choices[0].text == hw.generate(net, "Once upon", max_new_tokens=12, temperature=0.8, seed=7)


def test_several_prompts_and_choices_are_numbered_through(client: openai.OpenAI, net: Transformer):
    answer = client.completions.create(model="small", prompt=["One", "Two and"], n=2, max_tokens=5, temperature=0)
    expected = [hw.generate(net, prompt, max_new_tokens=5) for prompt in ("One", "One", "Two and", "Two and")]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    ids = client.completions.create(model="small", prompt=[[79, 110, 101]], max_tokens=5, temperature=0)
    assert ids.choices[0].text == expected[0]


def test_streams_hand_on_the_same_text(client: openai.OpenAI, net: Transformer):
    options = {"model": "small", "max_tokens": 20, "temperature": 0, "stream": True}
    expected = hw.generate(net, "Once", max_new_tokens=20)
    for prompt in ("Once", list(b"Once")):
        chunks = list(client.completions.create(prompt=prompt, stream_options={"include_usage": True}, **options))
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 20


def test_stop_texts_are_not_part_of_the_answer(client: openai.OpenAI, net: Transformer):
    whole = hw.generate(net, "Once", max_new_tokens=30)
    stop = whole[8:10]
    answer = client.completions.create(model="small", prompt="Once", max_tokens=30, temperature=0, stop=[stop, "zzz"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.completions.create(
        model="small", prompt="Once", max_tokens=30, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]


def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI, net: Transformer):
    answer = client.completions.create(model="small", prompt="Once", max_tokens=6, temperature=0, logprobs=3, echo=True)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert text == "Once" + hw.generate(net, "Once", max_new_tokens=6)
    ids = torch.tensor([[*b"Once", *hw.generate(net, [*b"Once"], max_new_tokens=6)]])
    with torch.no_grad():
        expected = copy.deepcopy(net).double()(ids)[0].log_softmax(-1)
    assert logprobs.token_logprobs[0] is None
    for position in range(1, ids.shape[1]):
        assert logprobs.token_logprobs[position] == pytest.approx(
            float(expected[position - 1, ids[0, position]]), abs=1e-4
        )
        likeliest = expected[position - 1].topk(3).values.tolist()
        assert sorted(logprobs.top_logprobs[position].values(), reverse=True) == pytest.approx(likeliest, abs=1e-4)
    scored = client.completions.create(model="small", prompt="Once", max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].text == "Once"
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(logprobs.token_logprobs[:4])
    assert scored.choices[0].logprobs.text_offset == [0, 1, 2, 3]


def expected_logprobs(net: Transformer, prompt: bytes, output: bytes) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] at each output token, by one pass in float64."""
    with torch.no_grad():
        logits = copy.deepcopy(net).double()(torch.tensor([[*prompt, *output]]))
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def test_log_probabilities_of_streams(client: openai.OpenAI, net: Transformer):
    """While decoding: equal to those of the whole answer and of a float64 pass; token by token, before the end."""
    options: dict[str, Any] = {"model": "small", "prompt": "Once", "max_tokens": 24, "temperature": 0, "logprobs": 4}
    whole = client.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert whole.logprobs is not None
    assert len(parts) > 3
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part, name)]
        assert joined == (
            pytest.approx(getattr(whole.logprobs, name), abs=1e-5) if name != "tokens" else whole.logprobs.tokens
        )
    ids = hw.generate(net, [*b"Once"], max_new_tokens=24)
    expected = expected_logprobs(net, b"Once", bytes(ids))
    assert whole.logprobs.token_logprobs == pytest.approx(expected[range(len(ids)), ids].tolist(), abs=1e-4)
    tops = [top for part in parts for top in part.top_logprobs or ()]
    for top, row in zip(tops, expected, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat: dict[str, Any] = {"model": "small", "messages": messages, "max_tokens": 9, "temperature": 0}
    chat |= {"logprobs": True, "top_logprobs": 2}
    message = client.chat.completions.create(**chat).choices[0].logprobs
    deltas = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **chat)]
    tokens = [token for delta in deltas if delta for token in delta.content or ()]
    assert message is not None
    assert [token.token for token in tokens] == [token.token for token in message.content or ()]
    assert [token.logprob for token in tokens] == pytest.approx(
        [token.logprob for token in message.content or ()], abs=1e-5
    )
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_log_probabilities_end_with_the_stop_text_and_ignore_constraints(client: openai.OpenAI, net: Transformer):
    text = hw.generate(net, "Once", max_new_tokens=30)
    options: dict[str, Any] = {"model": "small", "prompt": "Once", "max_tokens": 30, "logprobs": 1}
    stop = text[8:10]
    for is_streamed in (False, True):
        answer = client.completions.create(temperature=0, stop=stop, stream=is_streamed, **options)
        choices = [chunk.choices[0] for chunk in answer] if is_streamed else [answer.choices[0]]
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
        assert "".join(tokens) == text[: text.index(stop)] == "".join(choice.text for choice in choices)
    extra = {"structured_outputs": {"regex": "[a-f]{5}[0-9]"}}
    choice = client.completions.create(temperature=1, seed=5, extra_body=extra, **options).choices[0]
    assert choice.logprobs is not None
    expected = expected_logprobs(net, b"Once", choice.text.encode())
    chosen = expected[range(6), [*choice.text.encode()]]
    assert choice.logprobs.token_logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_the_model_runs_once_for_log_probabilities(
    client: openai.OpenAI, net: Transformer, monkeypatch: pytest.MonkeyPatch
):
    """No second pass over the text, as long as the prompt is not echoed."""
    calls: list[int] = []
    forward = type(net).forward

    def counted(self: Transformer, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(x.shape[1])
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(type(net), "forward", counted)
    options: dict[str, Any] = {"model": "small", "prompt": "Once", "max_tokens": 7, "temperature": 0, "logprobs": 1}
    assert client.completions.create(**options).usage.completion_tokens == 7
    assert calls == []
    client.completions.create(echo=True, **options)
    assert calls == [4]


def test_answers_of_a_form(client: openai.OpenAI, net: Transformer):
    """By OpenAI's own fields and by those of vLLM: JSON of a schema, any JSON object, a regular expression."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [7, 23]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
    common: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 60}
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(messages=messages, response_format=form, **common)
    assert json.loads(answer.choices[0].message.content or "") in ({"n": 7}, {"n": 23})
    assert answer.choices[0].finish_reason == "stop"
    expected = hw.generate(net, "Hi", max_new_tokens=60, config=hw.DecodingConfig(regex="[a-f]{5}[0-9]"))
    extra = {"structured_outputs": {"regex": "[a-f]{5}[0-9]"}}
    assert client.completions.create(prompt="Hi", extra_body=extra, **common).choices[0].text == expected
    parts = client.completions.create(prompt="Hi", extra_body=extra, stream=True, **common)
    assert "".join(part.choices[0].text for part in parts) == expected
    extra = {"structured_outputs": {"json": {"const": [1]}}}
    assert json.loads(client.completions.create(prompt="Hi", extra_body=extra, **common).choices[0].text) == [1]
    loose = client.chat.completions.create(messages=messages, response_format={"type": "json_object"}, **common)
    assert (loose.choices[0].message.content or "").startswith("{")


def test_chats_are_prompts_of_the_template(client: openai.OpenAI, net: Transformer):
    prompt = "<system>Be brief.\n<user>Hello\n<assistant>"
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    answer = client.chat.completions.create(
        model="small", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    expected = hw.generate(net, prompt, max_new_tokens=8)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2] * 8
    chunks = list(
        client.chat.completions.create(model="small", messages=messages, max_tokens=8, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_many_clients_at_once(client: openai.OpenAI, net: Transformer):
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = client.completions.create(model="small", prompt="ab" * (number + 1), max_tokens=10, temperature=0)
        texts[number] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == {n: hw.generate(net, "ab" * (n + 1), max_new_tokens=10) for n in range(12)}


def test_a_client_that_goes_away_ends_its_output(client: openai.OpenAI):
    with client.completions.create(model="small", prompt="x", max_tokens=1500, temperature=0, stream=True) as stream:
        next(iter(stream))
    metrics = client.with_options(timeout=30)._client.get
    base = str(client.base_url).removesuffix("/v1/")
    for _ in range(200):
        text = metrics(f"{base}/metrics", headers={"Authorization": "Bearer secret"}).text
        if "headwise_outputs 0\n" in text:
            break
        threading.Event().wait(0.05)
    assert "headwise_outputs 0\n" in text
    values = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    assert float(values["headwise_tokens_total"]) < 1500


def test_models_and_health(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "headwise"
    base = str(client.base_url).removesuffix("/v1/")
    assert client._client.get(f"{base}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is missing"),
        ({"prompt": [["a"]]}, "the prompt is of type list"),
        ({"prompt": [999]}, "999"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0: give an integer from 1 to 16777216"),
        ({"prompt": "a", "max_tokens": 10**9}, "tokens"),
        ({"prompt": "a", "temperature": 3}, "temperature=3: give a number from 0 to 2"),
        ({"prompt": "a", "top_p": 0, "temperature": 1}, "top_p must be above 0"),
        ({"prompt": "a", "stop": [""]}, "give a text that is not empty"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"prompt": "a", "max_token": 3}, "there is no field 'max_token'; did you mean 'max_tokens'"),
        ({"prompt": "a", "n": 17}, "n=17: give an integer from 1 to 16"),
        ({"prompt": "a", "stream": True, "echo": True}, "echo is not supported in streams"),
        ({"prompt": "a", "logprobs": True}, "logprobs=True: give an integer from 0 to 20"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "give a type of text, json_object, json_schema"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "the schema of response_format is missing"),
        ({"prompt": "a", "structured_outputs": {"grammar": "a"}}, 'give {"regex": '),
        ({"prompt": "a", "structured_outputs": {"regex": "a(("}}, "is not valid: unclosed group"),
    ],
)
def test_fields_that_cannot_be_answered_are_refused(client: openai.OpenAI, fields: dict[str, Any], message: str):
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/completions", body={"model": "small", **fields}, cast_to=object)


def test_other_models_and_keys_are_refused(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'; this server has 'small'"):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        client.with_options(api_key="wrong").models.list()


@pytest.fixture
def http(net: Transformer) -> Iterator[TestClient]:
    """Requests without a client library, to a server without a template or a key."""
    engine = hw.Engine(net, budget=1_000_000)
    app = ApiSecurity(ApiServer(ServedModel("small", engine)).app(), ["testserver"], None)
    with engine.background_thread():
        yield TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        ({}, 200),
    ],
)
def test_who_may_call(http: TestClient, headers: dict[str, str], status: int):
    body = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0})
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"} | headers)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["message"]


def test_bodies_and_paths_that_are_not_part_of_the_interface(http: TestClient):
    for body, message in [("{", "the body is not JSON"), ("[1]", "the body is a list, not a JSON object")]:
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"].startswith(message)) == (400, True)
    assert http.post("/v1/embeddings", json={}).status_code == 404
    assert http.get("/v1/completions").status_code == 405
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert "this model has no chat template" in answer.json()["error"]["message"]


def test_a_model_that_fails_is_reported(http: TestClient, net: Transformer, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the tensors do not fit")

    with monkeypatch.context() as patch:
        patch.setattr("headwise.serving.model_runner.ModelRunner.step", fail)
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the model failed: the tensors do not fit"
        streamed = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
        assert "the model failed: the tensors do not fit" in streamed.text
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "temperature": 0}).status_code == 200


def test_servers_that_others_can_reach_need_a_key(net: Transformer):
    model = ServedModel("small", hw.Engine(net, budget=1_000_000))
    with pytest.raises(ValueError, match="give an API key, or listen on"):
        serve(model, ServeOptions("0.0.0.0", 0), lambda _: None)


def test_templates_come_from_the_model_folder(tmp_path: Path):
    assert read_chat_template(tmp_path) is None
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render([ChatMessage("user", "Hi")]) == "<s>Hi"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    template = read_chat_template(tmp_path)
    assert template is not None
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        template.render([ChatMessage("user", "Hi")])
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    template = read_chat_template(tmp_path)
    assert template is not None
    with pytest.raises(ValueError, match="refuses these messages"):
        template.render([ChatMessage("user", "Hi")])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="is not valid"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took longer than 2 s"),
        ("{{ 'a' * 9999999999 }}", "needs more than 1,024 MiB"),
        ("{{ messages[0].content | center(9999999999) }}", "needs more than 1,024 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ '%d' % messages[0].content }}", "format"),
    ],
)
def test_a_hostile_template_fails_its_own_request(text: str, reason: str, net: Transformer):
    template = ChatTemplate(text)
    template._process.max_seconds = 2
    model = ServedModel("small", hw.Engine(net, budget=4_000_000), template)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with TestClient(ApiServer(model).app()) as http, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(http.post, "/v1/chat/completions", json=body)
        longest = 0.0
        while not answer.done():
            begin = time.monotonic()
            assert http.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - begin)
        assert answer.result().status_code == 400
        assert reason in answer.result().json()["error"]["message"]
        assert longest < 1.5, "the event loop waited for the template"


def test_a_template_that_is_nested_too_deeply_is_not_valid():
    with pytest.raises(ValueError, match=r"is not valid: it is nested too deeply; correct chat_template.jinja"):
        ChatTemplate("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")


def test_a_port_that_is_taken_is_said(net: Transformer):
    with socket.socket() as other_server:
        other_server.bind(("127.0.0.1", 0))
        other_server.listen()
        port = other_server.getsockname()[1]
        with pytest.raises((OSError, ValueError), match=str(port)):
            serve(ServedModel("small", hw.Engine(net, budget=1_000_000)), ServeOptions(port=port), lambda _: None)


# --- a hostile tokenizer ---------------------------------------------------------------------------------


def test_a_text_that_cannot_be_decoded_fails_one_request_alone(net: Transformer, monkeypatch: pytest.MonkeyPatch):
    hostile, document = copy.deepcopy(net), json.loads(net.usage.tokenizer or "")
    replace = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "a"}
    document["decoder"] = {"type": "Sequence", "decoders": [replace, document["decoder"]]}
    hostile.usage = hw.ProcessorSpec(tokenizer=json.dumps(document))
    server = ApiServer(ServedModel("small", hw.Engine(hostile, budget=4_000_000)))
    _, decoding = server.tokenizer_processes
    decode, engine = decoding.decode, server.model.engine
    first, *others = [engine.submit(prompt, max_new_tokens=4) for prompt in ("ab", "b", "c", "d", "e")]
    engine.run()
    bad_id = first.ids[1]
    expected = [stream.ids for stream in others]
    assert any(bad_id not in ids for ids in expected)

    def fail_once(ids: list[int]) -> str:
        if bad_id in ids:
            raise hw.SpecError("the tokenizer cannot decode these ids: it crashed")
        return decode(ids)

    monkeypatch.setattr(decoding, "decode", fail_once)
    first, *others = [engine.submit(prompt, max_new_tokens=4) for prompt in ("ab", "b", "c", "d", "e")]
    engine.run()
    assert (first.ended, first.ids, str(first.error)) == (
        "failed",
        first.ids[:1],
        "the tokenizer cannot decode these ids: it crashed",
    )
    for stream, ids in zip(others, expected, strict=True):
        assert stream.ended == ("failed" if bad_id in ids else "length")
        assert bad_id in ids or stream.ids == ids
    assert engine.memory.used == 0
    server.close()


def test_a_runaway_tokenizer_fails_one_request_alone(net: Transformer):
    hostile, document = copy.deepcopy(net), json.loads(net.usage.tokenizer or "")
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, document["pre_tokenizer"]]}
    hostile.usage = hw.ProcessorSpec(tokenizer=json.dumps(document))
    server = ApiServer(ServedModel("small", hw.Engine(hostile, budget=4_000_000)))
    server.tokenizer_processes[0].max_seconds = 2.5  # also for the start of the next process, beside other tests
    slow = ("a" * 27 + "b") * 10_000  # the expression tries all ways to divide each run of a
    answers: dict[str, Any] = {}

    def ask(client: TestClient, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        answers[prompt] = client.post("/v1/completions", json=body)

    with server.model.engine.background_thread(), TestClient(server.app()) as client:
        ask(client, "ab")
        threads = [threading.Thread(target=ask, args=(client, prompt)) for prompt in (slow, "b", "ba")]
        for thread in threads:
            thread.start()
        assert client.get("/health").status_code == 200  # while the tokenizer is busy
        for thread in threads:
            thread.join(30)
    refused = answers.pop(slow)
    assert refused.status_code == 400
    assert "the tokenizer cannot encode this text: it took longer than 2.5 s" in refused.json()["error"]["message"]
    assert {answer.status_code for answer in answers.values()} == {200}
    assert server.num_outputs == 0
    server.close()
