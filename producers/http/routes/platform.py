"""The platform itself: whether it is alive and ready, what is running and waiting, and which models
exist."""

import asyncio
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.disks import disks
from infra.readmodel.platform import oldest_waiting_s
from infra.readmodel.wait_reasons import describe_holder
from infra.telemetry import prometheus
from producers.core.models.known_models import known_models
from producers.http.requests import body_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services, waiting_for
from producers.http.routing import ScopedRoute
from schemas.events.pages import asyncapi_json
from schemas.models.families import describe_families

Samples = Mapping[str, float]


async def healthz(_: Request) -> Response:
    return ApiResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Ready once the database answers. Otherwise the status is 503, like everywhere else."""
    await services(request).readmodel.platform.alive()
    return ApiResponse({"status": "ready"})


async def status(request: Request) -> Response:
    core = services(request)
    platform = core.readmodel.platform
    return ApiResponse(
        {
            "version": own_version(),
            "home": str(core.settings.home),
            "workers": await platform.workers(),
            "effects": await platform.effects(),
            "lag": await platform.lag(),
            "bus": await platform.bus(_bus_kind(request)),
            "read_model": await core.readmodel.skipped_events.summary(),
            "horizon_age_s": round(await platform.horizon_age_s(), 3),
            "horizon_holders": [describe_holder(h) for h in await core.readmodel.waits.holders()],
            "waiting_for": await waiting_for(request, None),
            "runs": await platform.run_counts(),
            "disks": await asyncio.to_thread(disks, core.settings.directories),
            "database_bytes": await platform.database_bytes(),
        }
    )


async def rebuild(request: Request) -> Response:
    """Empty the read model. Its projector then fills it again from the log, and `read_model` of
    `/status` shows the progress. In the response, `skipped` is the number of events that had been
    skipped, and `until` is the cursor at which the rebuild is complete: later events are new."""
    await body_of(request, ())
    core = services(request)
    readmodel = core.readmodel
    skipped = sum((await readmodel.skipped_events.by_type()).values())
    await readmodel.reset()
    until = str(await core.log.visible_head())
    document = {"rebuilding": True, "skipped": skipped, "until": until}
    return ApiResponse(document, status_code=202)


def _bus_kind(request: Request) -> str:
    return "kafka" if services(request).settings.kafka else "log"


async def metrics(request: Request) -> Response:
    """The metrics of the platform in Prometheus's text format."""
    platform = services(request).readmodel.platform
    effects = await platform.effects()
    lanes = {
        f'lane="{lane}",state="{state}"': float(count)
        for lane, counts in effects.items()
        for state, count in (("waiting", counts["waiting"]), ("claimed", counts["claimed"]))
    }
    found = await services(request).readmodel.stalled.count()
    stalled = {f'lane="{lane}"': float(count) for lane, count in found.items()}
    lag = {f'consumer="{name}"': float(n) for name, n in (await platform.lag()).items()}
    bus = await platform.bus(_bus_kind(request))
    skipped = await services(request).readmodel.skipped_events.by_type()
    runs = {f'status="{name}"': float(n) for name, n in (await platform.run_counts()).items()}
    ages = services(request).poll_ages.seconds()
    counts = services(request).webhooks.counts
    deliveries = {
        f'forge="{forge}",result="{result}"': float(count)
        for (forge, result), count in sorted(counts.items())
    }
    steps = {f'run="{run}",key="{key}"': value for run, key, value in await platform.step_metrics()}
    text = prometheus(
        {
            "headrace_workers": ("live workers", {"": float(len(await platform.workers()))}),
            "headrace_effects": ("effects per lane; waiting ones are counted up to 10,000", lanes),
            "headrace_oldest_waiting_seconds": (
                "how long the oldest effect waits of those that are next in their queue",
                {"": oldest_waiting_s(effects)},
            ),
            "headrace_stalled_effects": (
                "effects that a live worker holds without progress, far longer than usual",
                stalled or {"": 0.0},
            ),
            "headrace_lag_events": ("events above a consumer's watermark", lag),
            "headrace_relay_lag_events": (
                "events that the relay has not published to Kafka",
                {"": float(bus["relay_behind"])} if bus["kind"] == "kafka" else {},
            ),
            "headrace_kafka_lag_records": (
                "records that a consumer group has not acknowledged",
                {f'consumers="{name}"': float(n) for name, n in bus["lag"].items()},
            ),
            "headrace_kafka_seen_seconds": (
                "since when the relay has not seen Kafka well",
                {"": bus["seen_s"]} if bus["seen_s"] is not None else {},
            ),
            "headrace_bus_skipped": (
                "records that no consumer could use",
                {f'reason="{reason}"': float(n) for reason, n in bus["skipped"].items()},
            ),
            "headrace_read_model_skipped_events": (
                "events that the read model lacks because projecting them failed",
                {f'type="{name}"': float(n) for name, n in skipped.items()} or {"": 0.0},
            ),
            "headrace_webhook_deliveries": (
                "deliveries of forges since the start of the control process",
                deliveries,
            ),
            "headrace_poll_age_seconds": (
                "since when a connected repository was last asked for its refs with success",
                {f'workspace="{name}"': age for name, age in ages.items()},
            ),
            "headrace_page_reports": (
                "reports of browsers about code or addresses that a page of the dashboard may not use",
                {"": float(services(request).page_reports.count)},
            ),
            "headrace_horizon_age_seconds": (
                "how long the oldest transaction holds the log's horizon",
                {"": await platform.horizon_age_s()},
            ),
            "headrace_runs": ("runs per status", runs),
            "headrace_tokens_per_second": (
                "generated tokens that a running run trains on, over its last steps",
                {f'run="{name}"': rate for name, rate in (await platform.tokens_per_s()).items()},
            ),
            "headrace_last_step": ("metrics of the last step of running runs", steps),
            "headrace_dead_letters": (
                "messages that no consumer could decide on and nobody has driven again",
                {"": float(await services(request).readmodel.letters.waiting())},
            ),
        }
    )
    return Response(text, media_type="text/plain; version=0.0.4")


async def models(_: Request) -> Response:
    return ApiResponse({"models": await known_models(), "families": describe_families()})


def own_version() -> str:
    """The version of Headrace that is installed. A source tree that is not installed has no version."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0+source"


async def events_document(_: Request) -> Response:
    """Every event as an AsyncAPI document, for programs that read the log or its topics."""
    document = await asyncio.to_thread(asyncapi_json)
    return Response(document, media_type="application/json")


ROOT_ROUTES = [
    ScopedRoute("/healthz", healthz, scope="open"),
    ScopedRoute("/readyz", readyz, scope="open"),
    ScopedRoute("/metrics", metrics, scope="metrics", reach="installation"),
]
ROUTES = [
    ScopedRoute("/status", status, scope="read", reach="installation"),
    ScopedRoute("/models", models, scope="read"),
    ScopedRoute("/asyncapi.json", events_document, scope="read"),
    ScopedRoute("/rebuild", rebuild, scope="admin", reach="installation", methods=["POST"]),
]
