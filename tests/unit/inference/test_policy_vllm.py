"""The client against servers that answer as vLLM documents it, and as it should not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from infra.inference.base import (
    BadReply,
    ContextOverflow,
    ModelPathMissing,
    PolicyError,
    PolicyOverloaded,
    PolicyRefused,
    PolicyTooSlow,
    PolicyUnreachable,
    VersionSpan,
)
from infra.inference.vllm import VllmClient
from schemas.transcript import Repetition, Sampling


class FakeVllm:
    """Answers each path with what a test put there, and keeps what it was asked."""

    def __init__(self):
        # Paused, and a server of ours, which looks for weights by itself.
        self.replies = {
            "/is_paused": (200, {"is_paused": True}),
            "/v1/models": (200, {"data": [{"id": "policy", "dtype": "float32"}]}),
        }
        self.asked = []

    async def handle(self, request):
        body = await request.read()
        self.asked.append((request.path_qs, json.loads(body) if body else None))
        status, reply = self.replies.get(request.path, (404, {"detail": "Not Found"}))
        if isinstance(reply, bytes):
            return web.Response(body=reply, status=status)
        return web.json_response(reply, status=status)

    def asked_of(self, path):
        return [body for asked, body in self.asked if asked == path]

    def answers(self, choice, status=200):
        self.replies["/inference/v1/generate"] = (status, {"request_id": "a", "choices": [choice]})


@pytest.fixture
async def fake():
    server = FakeVllm()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


def choice(**changes):
    """An answer as vLLM 0.32 gives it."""
    return {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": [7, 2],
        "logprobs": {
            "content": [
                {"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                {"token_id": 2, "logprob": -1.25, "rank": 2, "top_logprobs": []},
            ]
        },
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    } | changes


async def ask(fake, **kwargs):
    async with VllmClient(fake.url, model="policy", **kwargs) as client:
        return await client.generate(
            [1, 2], Sampling(temperature=0.5, max_tokens=9), seed=2**63 + 5, request_id="a", stop_token_ids=(2,)
        )


async def test_a_request_has_vllms_words(fake):
    """Everything that decides the draw travels, and nothing of the engine's defaults stays."""
    fake.answers(choice())
    await ask(fake)
    ((path, body),) = fake.asked
    assert path == "/inference/v1/generate"
    assert (body["model"], body["token_ids"], body["request_id"]) == ("policy", [1, 2], "a")
    expected = {
        "temperature": 0.5,
        "max_tokens": 9,
        "logprobs": 0,
        "seed": 5,
        "stop_token_ids": [2],
        "ignore_eos": True,
    }
    assert expected.items() <= body["sampling_params"].items()


async def test_rules_for_the_end_are_asked_for_in_words_of_vllm_and_carried_out_anyway(fake):
    """It knows loops and single ids, not sequences; what it samples behind the end of one is no part of the answer."""
    fake.answers(choice())
    rule = Repetition(max_pattern_size=8, min_pattern_size=2, min_count=3)
    async with VllmClient(fake.url) as client:
        sampling = Sampling(stop_sequences=((7,), (8, 9)), repetition=rule)
        answer = await client.generate([1, 2], sampling, seed=1, request_id="a", stop_token_ids=(2,))

    assert (answer.token_ids.tolist(), answer.finish_reason) == ([7], "stop_sequence")
    assert answer.versions == (VersionSpan(start=0, stop=1, version=4),)
    asked = fake.asked[0][1]["sampling_params"]
    assert asked["stop_token_ids"] == [2, 7]
    assert asked["repetition_detection"] == {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    assert asked["extra_args"] == {"stop_sequences": [[7], [8, 9]]}


async def test_an_answer_of_current_vllm_is_read(fake):
    """Ids, log-probs, reason and version spans."""
    fake.answers(choice())
    answer = await ask(fake)
    assert answer.token_ids.tolist() == [7, 2]
    assert answer.logprobs.tolist() == [-0.5, -1.25]
    assert (answer.finish_reason, answer.versions) == ("stop", (VersionSpan(start=0, stop=2, version=4),))


async def test_an_answer_of_older_vllm_is_read(fake):
    """Log-prob entries that name their token `token_id:N`; weights that nobody labelled are version 0."""
    content = [
        {"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []},
        {"token": "token_id:2", "logprob": -1.25, "bytes": None, "top_logprobs": []},
    ]
    spans = [{"version": "default", "start": 0, "end": 2}]
    fake.answers(choice(logprobs={"content": content}, weight_versions=spans))
    assert (await ask(fake)).versions == (VersionSpan(start=0, stop=2, version=0),)


BAD = {
    "no ids": {"token_ids": None},
    "no log-probs": {"logprobs": None},
    "short log-probs": {"logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}},
    "log-probs of other ids": {
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 3, "logprob": -0.5}]}
    },
    "a log-prob that is no number": {
        "logprobs": {"content": [{"token_id": 7, "logprob": None}, {"token_id": 2, "logprob": -1}]}
    },
    "no versions": {"weight_versions": None},
    "versions with a gap": {"weight_versions": [{"version": "4", "start": 1, "end": 2}]},
    "versions that end early": {"weight_versions": [{"version": "4", "start": 0, "end": 1}]},
    "a version that is no number": {"weight_versions": [{"version": "main", "start": 0, "end": 2}]},
    "an unknown reason": {"finish_reason": "content_filter"},
    "nothing sampled": {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []},
    "negative ids": {"token_ids": [7, -2], "logprobs": {"content": [{"logprob": -1}, {"logprob": -1}]}},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
async def test_an_answer_that_cannot_be_trained_on_is_refused(fake, changes):
    """Nothing is padded or made up."""
    fake.answers(choice(**changes))
    with pytest.raises(BadReply):
        await ask(fake)


async def test_garbage_is_a_bad_reply(fake):
    """A body that is no JSON shows its beginning."""
    fake.replies["/inference/v1/generate"] = (200, b"<html>")
    with pytest.raises(BadReply, match="<html>"):
        await ask(fake)


OVERFLOW = "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure ..."


@pytest.mark.parametrize(
    ("status", "reply", "error"),
    [
        (429, {"error": {"message": "slow down", "type": "RateLimit", "code": 429}}, PolicyOverloaded),
        (503, b"upstream busy", PolicyOverloaded),
        (500, {"error": {"message": "CUDA", "type": "InternalServerError", "code": 500}}, PolicyError),
        (400, {"error": {"message": OVERFLOW, "type": "BadRequestError", "code": 400}}, ContextOverflow),
        (400, {"error": {"message": "bad seed", "type": "BadRequestError", "code": 400}}, PolicyRefused),
        (404, {"error": {"message": "no model `x`", "type": "NotFoundError", "code": 404}}, PolicyRefused),
    ],
)
async def test_refusals_have_types(fake, status, reply, error):
    """Each way to say no is one error, with the engine's own words in it."""
    fake.replies["/inference/v1/generate"] = (status, reply)
    with pytest.raises(error) as caught:
        await ask(fake)
    assert type(caught.value) is error
    assert f"answered {status}" in str(caught.value)


async def test_a_missing_route_names_the_flags(fake):
    """A vLLM started without its scale-out or development routes."""
    with pytest.raises(PolicyRefused, match="--enable-scale-out"):
        await ask(fake)


async def test_a_silent_engine_is_unreachable(fake):
    """The limit ends the wait, and the error says how long it was."""
    fake.answers(choice())
    async with VllmClient(fake.url, control_timeout_s=1e-9) as client:
        with pytest.raises(PolicyUnreachable, match="did not answer"):
            await client.info()


async def test_a_generation_that_takes_too_long_is_no_outage(fake):
    """The engine is there: a long answer must not open its breaker."""
    with pytest.raises(PolicyTooSlow, match="did not answer"):
        await ask(fake, generate_timeout_s=1e-9)


async def test_loading_is_reload_reset_label(fake):
    """The order of calls; afterwards prompts are salted by the new version, so that no old prefix is found."""
    fake.replies |= {
        "/collective_rpc": (200, {"results": [None]}),
        "/reset_prefix_cache": (200, {"success": False}),
        "/update_weight_version": (200, {"success": True, "new_version": "9"}),
        "/weight_info": (200, {"weight_version": "9"}),
    }
    fake.answers(choice(weight_versions=[{"version": "9", "start": 0, "end": 2}]))
    async with VllmClient(fake.url) as client:
        await client.load(Path("/weights/9"), 9)
        await client.generate([1], Sampling(), seed=1, request_id="b")
    assert [path for path, _ in fake.asked] == [
        "/is_paused",
        "/v1/models",
        "/weight_info",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/weight_info",
        "/inference/v1/generate",
    ]
    assert fake.asked_of("/update_weight_version") == [{"new_version": "-1"}, {"new_version": "9"}]
    assert fake.asked_of("/collective_rpc") == [{"method": "reload_weights", "kwargs": {"weights_path": "/weights/9"}}]
    assert [body["cache_salt"] for body in fake.asked_of("/inference/v1/generate")] == ["9"]


async def test_a_load_that_breaks_in_the_middle_leaves_no_old_label_on_new_weights(fake):
    """Nobody can say whose tokens those would be: until a load has ended well they are nobody's."""
    fake.replies |= {
        "/collective_rpc": (200, {"results": [None]}),
        "/reset_prefix_cache": (500, {"detail": "stuck"}),
        "/update_weight_version": (200, {"success": True}),
        "/weight_info": (200, {"weight_version": "8@r"}),
    }
    async with VllmClient(fake.url) as client:
        with pytest.raises(PolicyError, match="stuck"):
            await client.load(Path("/weights/9"), 9, "r")

    assert fake.asked_of("/update_weight_version") == [{"new_version": "-1"}]


async def test_weights_that_an_engine_does_not_find_leave_the_old_ones_with_their_label(fake):
    """Nothing was changed, and the engine goes on."""
    fake.replies |= {
        "/collective_rpc": (404, {"error": {"message": "no such directory", "type": "ModelPathMissing"}}),
        "/update_weight_version": (200, {"success": True}),
        "/weight_info": (200, {"weight_version": "8@r"}),
    }
    async with VllmClient(fake.url) as client:
        with pytest.raises(PolicyRefused, match="no such directory"):
            await client.load(Path("/weights/9"), 9, "r")

    assert fake.asked_of("/update_weight_version") == [{"new_version": "-1"}, {"new_version": "8@r"}]


def weights(folder, *, width=4):
    """Write a directory of weights and return it."""
    folder.mkdir()
    save_file({"a": np.zeros((2, width), np.float32)}, folder / "model.safetensors")
    return folder


def cut_short(folder):
    file = weights(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return folder


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (lambda folder: folder, ModelPathMissing, r"no model.safetensors in .*, as seen from here"),
        (cut_short, PolicyRefused, "not a whole safetensors file: it has"),
        (
            lambda folder: weights(folder, width=5),
            PolicyRefused,
            r"another model .*: other shape: a \(2, 5\) for \(2, 4\)",
        ),
    ],
)
async def test_what_vllm_would_not_survive_is_not_asked_of_it(fake, tmp_path, given, error, says):
    """It shuts itself down where it cannot load: the weights are looked at first, and nothing is changed."""
    fake.replies |= {
        "/v1/models": (200, {"data": [{"id": "policy", "root": str(weights(tmp_path / "served"))}]}),
        "/server_info": (200, {"vllm_config": {"device_config": {"device": "cuda"}}}),
    }
    async with VllmClient(fake.url) as client:
        with pytest.raises(error, match=says):
            await client.load(given(tmp_path / "9"), 9, "r")

    assert [path for path, _ in fake.asked] == ["/is_paused", "/v1/models", "/server_info?config_format=json"]


@pytest.mark.parametrize(
    ("device", "tied", "refused"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
async def test_tied_weights_are_not_given_to_vllm_on_a_processor(fake, tmp_path, device, tied, refused):
    """It would go on with the old output layer, and say that it has the new version."""
    served, given = weights(tmp_path / "served"), weights(tmp_path / "9")
    (served / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    fake.replies |= {
        "/v1/models": (200, {"data": [{"id": "policy", "root": str(served)}]}),
        "/server_info": (200, {"vllm_config": {"device_config": {"device": device}}}),
        "/collective_rpc": (200, {"results": [None]}),
        "/reset_prefix_cache": (200, {"success": True}),
        "/update_weight_version": (200, {"success": True}),
        "/weight_info": (200, {"weight_version": "9@r"}),
    }
    async with VllmClient(fake.url) as client:
        if refused:
            with pytest.raises(PolicyRefused, match="keeps the old output layer"):
                await client.load(given, 9, "r")
        else:
            await client.load(given, 9, "r")
    assert bool(fake.asked_of("/collective_rpc")) != refused


async def test_an_engine_that_samples_is_given_no_weights(fake):
    """vLLM would take them, and nobody could say which weights sampled a token."""
    fake.replies["/is_paused"] = (200, {"is_paused": False})
    async with VllmClient(fake.url) as client:
        with pytest.raises(PolicyRefused, match="only while the engine is paused"):
            await client.load(Path("/weights/9"), 9, "r")

    assert [path for path, _ in fake.asked] == ["/is_paused"]


async def test_tokens_of_weights_that_were_being_exchanged_are_refused(fake):
    """They cannot be trained on."""
    fake.answers(choice(weight_versions=[{"version": "-1", "start": 0, "end": 2}]))
    with pytest.raises(BadReply, match="while the weights were exchanged"):
        await ask(fake)


async def test_the_label_of_weights_names_their_run(fake):
    """So nobody takes one run's version 9 for another's; a prompt finds no prefix of the other one either."""
    fake.replies |= {
        "/collective_rpc": (200, {"results": [None]}),
        "/reset_prefix_cache": (200, {"success": True}),
        "/update_weight_version": (200, {"success": True}),
        "/weight_info": (200, {"weight_version": "9@my-run"}),
    }
    fake.answers(choice(weight_versions=[{"version": "3@other", "start": 0, "end": 2}]))
    async with VllmClient(fake.url) as client:
        await client.load(Path("/weights/9"), 9, "my-run")
        salts = []
        for served in ("9@my-run", "3@other", "3@other"):
            fake.replies["/weight_info"] = (200, {"weight_version": served})
            answer = await client.generate([1], Sampling(), seed=1, request_id="b")
            salts.append(next(body["cache_salt"] for _, body in reversed(fake.asked) if body and "cache_salt" in body))
    assert fake.asked_of("/update_weight_version")[-1] == {"new_version": "9@my-run"}
    assert answer.versions == (VersionSpan(start=0, stop=2, version=3, run="other"),)
    assert salts == ["9.my-run", "9.my-run", "3.other"], "the first answer was late: the engine still had my-run's"


async def test_an_older_answer_that_comes_late_does_not_bring_its_salt_back(fake):
    """Prompts after a load must not find what older weights of the run computed."""
    async with VllmClient(fake.url) as client:
        fake.replies["/weight_info"] = (200, {"weight_version": "9@r"})
        for version in ("9@r", "8@r", "8@r"):
            fake.answers(choice(weight_versions=[{"version": version, "start": 0, "end": 2}]))
            await client.generate([1], Sampling(), seed=1, request_id="b")
    assert [body["cache_salt"] for _, body in fake.asked if body] == ["0", "9.r", "9.r"]


async def test_a_version_that_did_not_take_is_noticed(fake):
    """Two loaders at one engine: the second one's label wins, and the first one is told."""
    fake.replies |= {
        "/collective_rpc": (200, {"results": [None]}),
        "/reset_prefix_cache": (200, {"success": True}),
        "/update_weight_version": (200, {"success": True, "new_version": "9"}),
        "/weight_info": (200, {"weight_version": "8"}),
    }
    async with VllmClient(fake.url) as client:
        with pytest.raises(BadReply, match="another loader"):
            await client.load(Path("/weights/9"), 9)


async def test_info_of_vllm_comes_from_three_routes(fake, tmp_path):
    """Model, version, number format and log-prob mode; the digest from the engine's own directory."""
    (tmp_path / "tokenizer.json").write_text("{}")
    fake.replies |= {
        "/v1/models": (200, {"data": [{"id": "policy", "max_model_len": 2048, "root": str(tmp_path)}]}),
        "/weight_info": (200, {"weight_version": "default"}),
        "/server_info": (
            200,
            {"vllm_config": {"model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs"}}},
        ),
    }
    async with VllmClient(fake.url) as client:
        info = await client.info()
    assert (info.model, info.max_model_len, info.version) == ("policy", 2048, 0)
    assert (info.dtype, info.logprobs_mode) == ("bfloat16", "raw_logprobs")
    assert len(info.tokenizer_digest) == 64


async def test_another_model_than_asked_for_is_refused(fake):
    """The error lists what is served."""
    fake.replies["/v1/models"] = (200, {"data": [{"id": "llama"}]})
    async with VllmClient(fake.url, model="policy") as client:
        with pytest.raises(PolicyRefused, match="serves llama"):
            await client.info()
