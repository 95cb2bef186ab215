"""Identities of prefill engines, health, the choice of engines, models."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.router_fakes import (
    Identity,
    answer,
    refuse,
    stack,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


async def test_a_prefill_engine_that_does_not_tell_who_it_is_is_502():
    async with stack(well=False) as s:
        s.side.error = RuntimeError("the side channel is shut")
        async with s.post() as response:
            assert response.status == 502
            assert "side channel is shut" in (await response.json())["error"]["message"]
        assert not s.d.calls


async def test_a_failed_leg_makes_the_identity_be_asked_again():
    async with stack() as s:
        async with s.post() as response:
            assert response.status == 200
        asked = len(s.side.asked)
        s.d.script = refuse(500, {})
        s.side.identity = Identity(engine_id="engine-p2", incarnation="two")
        async with s.post() as response:
            assert response.status == 500
        s.d.script = answer
        async with s.post() as response:
            assert response.status == 200
        assert len(s.side.asked) > asked
        ids = [call.body["kv_transfer_params"]["remote_engine_id"] for call in s.d.calls]
        assert ids == [
            "engine-p",
            "engine-p",
            "engine-p2",
            "engine-p2",
        ]  # the second was tried twice


async def test_identity_is_cached_over_many_requests():
    async with stack() as s:
        for _ in range(5):
            async with s.post() as response:
                assert response.status == 200
        assert len(s.side.asked) <= 2


async def test_health():
    async with stack() as s:
        async with s.client.get(s.url + "/health") as response:
            assert response.status == 200
            health = await response.json()
        assert health["status"] == "ok"
        assert health["prefill"][0]["engine_id"] == "engine-p"
        assert health["decode"][0]["url"] == s.d.url
        s.d.well = False
        s.d.script = refuse(500, {})
        async with s.post():  # the failure has the engine probed at once
            pass
        for _ in range(100):
            async with s.client.get(s.url + "/health") as response:
                health = await response.json()
            if response.status == 503:
                break
            await asyncio.sleep(0.02)
        assert health["status"] == "unavailable"
        assert "503" in health["decode"][0]["error"]


async def test_an_engine_known_to_be_down_is_passed_over():
    async with stack(decode=2) as s:
        await s.d.stop()
        statuses = []
        for _ in range(6):
            async with s.post() as response:
                statuses.append(response.status)
            await asyncio.sleep(0.1)
        assert statuses == [200] * 6
        assert (
            await s.metric(
                'neuron_push_router_retries_total{leg="decode",outcome="unreachable",result="ok"}'
            )
            == 1
        )


async def test_models_come_from_a_decode_engine():
    async with stack() as s:
        headers = {"Authorization": "Bearer k"}
        async with s.client.get(s.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
            card = (await response.json())["data"][0]
        assert card == {"id": "served", "root": "tiny", "authorization": "Bearer k"}
        await s.d.stop()
        async with s.client.get(s.url + "/v1/models") as response:
            assert response.status == 502


async def test_model_check_refuses_a_pair_of_different_models():
    async with stack(model_check=True) as s:
        async with s.post() as response:
            assert response.status == 200
        s.side.identity = Identity(model="other", incarnation="two")
        s.d.script = refuse(500, {})
        async with s.post():
            pass
        async with s.post() as response:
            assert response.status == 503
            assert "'other'" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity(role="kv_consumer"), "is a decode engine"),
        (Identity(ready=False), "still starting"),
    ],
)
async def test_an_engine_that_cannot_prefill_is_not_used(identity: Identity, says: str):
    async with stack(well=False) as s:
        s.side.identity = identity
        async with s.post() as response:
            assert response.status == 502
            assert says in (await response.json())["error"]["message"]
        s.side.identity = Identity()
        async with s.post() as response:
            assert response.status == 200
