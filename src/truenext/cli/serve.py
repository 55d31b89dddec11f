"""Assembly of a broker, its run, and its stop."""

import asyncio
import faulthandler
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from truenext.broker.backups import Backups
from truenext.broker.broker import Broker
from truenext.broker.certificates import is_key_readable_by_others
from truenext.broker.config import Configuration
from truenext.broker.health import BrokerState
from truenext.broker.recovery import recover
from truenext.broker.reload import Reloader
from truenext.broker.settings import DEFAULT_DATA, BrokerSettings, Durability
from truenext.cli import early_signals, logs, machine
from truenext.cli.broker_health import BrokerProcess
from truenext.cli.files import raise_file_limit
from truenext.cli.loops import new_event_loop
from truenext.cli.postgresql import open_log
from truenext.cli.service_manager import ServiceManager, find_service_manager
from truenext.engine.engine import Engine
from truenext.engine.state.transaction import TransactionLimits
from truenext.errors import ConfigurationError, HandedOverError, StoreBehindError, TruenextError
from truenext.history.exporter import HistoryExporter
from truenext.history.writer import HistoryWriter
from truenext.model.limits import BROKER_BYTES
from truenext.model.numerals import format_size
from truenext.model.url import Address, host_and_port, parse_host_and_port, parse_listener_url
from truenext.server.listener import Listener, ListenerTls
from truenext.server.session_factories import make_session_factories
from truenext.store.backup import check_backup_folder
from truenext.store.embedded import EmbeddedStore
from truenext.store.folder import check_is_local, is_writable_by_others
from truenext.store.log import Log, MemberSettings
from truenext.store.memory import MemoryStore
from truenext.store.store import Recovered, Store
from truenext.version import VERSION

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.25
"""Share of the memory limit that messages may use. The rest of the limit is for the broker itself (BROKER_BYTES) and
its queues."""

STORE_SHARE = 0.5
"""Share of the memory limit that the store may use if the broker keeps nothing on disk."""

SWITCH_INTERVAL_S = 0.0001
"""Longest time in seconds for which one thread keeps the interpreter from another. The event loop needs the interpreter
after each system call. While another thread reads pages of lanes, this happens about five times for each message that
is sent and delivered. So does the thread of the health server beside a recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenStore:
    """Store of a broker, with its history and its log."""

    store: Store
    history: HistoryWriter | None = None
    """Writer of the history; None if the broker has none."""
    exporter: HistoryExporter | None = None
    log: Log | None = None
    """Log of which the store is a copy; None if the store is no copy."""


def serve(
    configuration: Configuration, reread: Callable[[], Configuration] | None = None, *, take_over: bool = False
) -> None:
    """Run a broker until SIGTERM or SIGINT. A broker without a data folder keeps everything in memory, and has no
    history.

    `reread` reads the configuration again for a reload. None: the broker has no file to reload. With `take_over` the
    broker starts although another one uses its log.

    Raises: ConfigurationError if a setting cannot be used; StoreError, HistoryError if the store or the history fails;
    HandedOverError after a request that another broker takes over
    """
    settings, memory_limit = configuration.broker, configuration.broker.memory_limit
    addresses = [parse_listener_url(url) for url in settings.listen]
    _check_ports(addresses, settings.health)
    for address in addresses:
        _check_address(address, configuration)
    fault = fault_of_memory_limit(memory_limit)
    if fault is not None:
        raise ConfigurationError(fault)
    # Before the broker stands by, perhaps for months.
    _log_warnings(configuration)
    manager = find_service_manager()
    if manager.has_watchdog:
        # The SIGABRT of a watchdog prints the stack of each thread.
        faulthandler.enable()
    process = BrokerProcess()
    member = _member_settings(configuration, manager, process)
    reloader = None if reread is None else Reloader(configuration, reread, apply=partial(_apply_settings, member))
    with ExitStack() as resources:
        resources.callback(manager.close)
        resources.callback(process.close)
        if settings.health is not None:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            process.serve_health(settings.health)
            print(f"health at {process.health_url}", flush=True)
        opened, engine, recovered = _open_and_recover(
            configuration, member, resources, take_over=take_over, reloader=reloader, manager=manager, process=process
        )
        if reloader is not None:
            configuration = reloader.current
        runner = resources.enter_context(asyncio.Runner(loop_factory=new_event_loop))
        tls = ListenerTls(None if configuration.certificates is None else configuration.certificates.context)
        make_broker = partial(
            Broker,
            engine,
            opened.store,
            history=opened.history,
            users=configuration.users,
            log=opened.log,
            backups=_make_backups(configuration, opened.store),
            policy_source=configuration.source,
        )
        make_listener = partial(
            Listener,
            identity=recovered.identity,
            server_name=settings.server_name,
            session_factories=make_session_factories(),
        )
        apply = partial(_apply_changes, tls, opened.exporter, process)
        run = partial(
            _run, make_broker, make_listener, addresses, tls, reloader, apply, manager, process, configuration
        )
        run = partial(run, after_clean_stop=recovered.clean_stop, identity=recovered.identity)
        # Frees the names of all queues.
        del recovered
        heir = runner.run(run())
    if heir is not None:
        raise HandedOverError(f"{heir} takes over; start this broker again, so that it stands by")


def _open_and_recover(
    configuration: Configuration,
    member: MemberSettings,
    resources: ExitStack,
    *,
    take_over: bool,
    reloader: Reloader | None,
    manager: ServiceManager,
    process: BrokerProcess,
) -> tuple[_OpenStore, Engine, Recovered]:
    """Open the store, and recover it. If it is a copy of a log, the broker stands by until it takes over. Meanwhile it
    reloads its configuration at SIGHUP, and feeds the watchdog of the service manager. `resources` closes the store.

    Raises: see `_open_store` and `recover`
    """
    while True:
        with ExitStack() as attempt:
            opened = _open_store(configuration.broker, member, attempt, take_over=take_over)
            if isinstance(opened.store, EmbeddedStore):
                opened.store.while_standing_by = partial(_while_standing_by, reloader, manager)
                opened.store.on_taken_over = partial(setattr, process, "state", BrokerState.RESTORING)
            try:
                engine, recovered = _recover(configuration, opened)
            except StoreBehindError as error:
                logger.warning("the data folder is too far behind, and is made anew", extra={"reason": str(error)})
                continue
            resources.enter_context(attempt.pop_all())
            return opened, engine, recovered


def _while_standing_by(reloader: Reloader | None, manager: ServiceManager) -> None:
    manager.feed_watchdog()
    if reloader is not None and early_signals.take_noted_sighup():
        reloader.reload()


def _recover(configuration: Configuration, opened: _OpenStore) -> tuple[Engine, Recovered]:
    settings, memory_limit = configuration.broker, configuration.broker.memory_limit
    return recover(
        opened.store,
        configuration.policies,
        when_full=settings.when_full,
        memory_limit=int(memory_limit * MEMORY_SHARE),
        queues_memory_limit=memory_limit - int(memory_limit * MEMORY_SHARE) - BROKER_BYTES,
        transaction_limits=TransactionLimits(
            settings.transactions_max, settings.transaction_bytes_max, settings.transaction_messages_max
        ),
        history=opened.history,
        log=opened.log,
    )


def _check_ports(addresses: Sequence[Address], health: str | None) -> None:
    """Check that no two addresses, that of the health server included, have the same host and port.

    Raises: ConfigurationError if two have
    """
    known: set[tuple[str, int]] = set()
    if health is not None:
        known.add(parse_host_and_port(health))
    for address in addresses:
        key = address.host, address.port
        if address.port and key in known:
            raise ConfigurationError(
                f"two addresses of --listen or --health name {host_and_port(*key)}: give each a port of its own"
            )
        if address.port:
            known.add(key)


def _check_address(address: Address, configuration: Configuration) -> None:
    """Check that the broker may listen on the address, and log a warning if this is unsafe.

    Raises: ConfigurationError if the broker may not
    """
    settings = configuration.broker
    if address.has_tls and configuration.certificates is None:
        raise ConfigurationError(
            f"{address.url} needs a certificate: --certificate FILE, or certificate in the configuration file"
        )
    if address.is_loopback:
        return
    if configuration.users is None:
        if not settings.allow_anonymous:
            raise ConfigurationError(
                f"{address.host} can be reached from other machines, which could read and write all queues without "
                "a password; listen on 127.0.0.1, give the broker users (--users), or use --allow-anonymous"
            )
        logger.warning(
            "clients from other machines can read and write all queues without a password",
            extra={"listener": address.url},
        )
    elif not address.has_tls:
        if not settings.allow_plaintext:
            raise ConfigurationError(
                f"{address.host} can be reached from other machines, and passwords would not be encrypted; listen "
                f"on {address.tls_scheme}:// with a certificate (--certificate), or use --allow-plaintext"
            )
        logger.warning(
            "connections are not encrypted: passwords and messages can be read on the network",
            extra={"listener": address.url},
        )


def _open_store(
    settings: BrokerSettings, member: MemberSettings, resources: ExitStack, *, take_over: bool
) -> _OpenStore:
    """Open the store and, if the broker has them, the log and the history. `resources` closes them.

    Raises: ConfigurationError if the data folder or the database cannot be used; StoreError, HistoryError if one of the
    three cannot be opened
    """
    data = settings.data
    if data is None:
        in_memory = MemoryStore(limit=int(settings.memory_limit * STORE_SHARE))
        resources.callback(in_memory.close)
        return _OpenStore(store=in_memory)
    if not settings.allow_network_disk:
        check_is_local(data)
    log = _open_log(settings, member, take_over=take_over)
    store = EmbeddedStore(data, disk_limit=settings.disk_limit, log=log)
    resources.callback(store.close)
    if log is not None:
        early_signals.call_before_end(log.leave)
    if is_writable_by_others(data):
        logger.warning("other users of this machine can write to the data folder", extra={"folder": str(data)})
    if not settings.history:
        return _OpenStore(store=store, log=log)
    exporter = HistoryExporter(
        data / "history", bytes_max=settings.history_bytes_max, days_max=settings.history_days_max
    )
    resources.callback(exporter.close)
    history = HistoryWriter(data / "history", on_rotate=exporter.start, on_write_error=store.delete_ballast)
    resources.callback(history.close)
    store.sync_history = history.sync
    store.last_history_chunk = history.last_batch_chunk
    store.restore_history = history.restore
    store.follow_history = history.follow
    store.flush_history = history.flush
    return _OpenStore(store=store, history=history, exporter=exporter, log=log)


def _make_backups(configuration: Configuration, store: Store) -> Backups:
    settings = configuration.broker
    refusal = ""
    if settings.store is not None:
        refusal = (
            "a broker with --store makes no backups: its messages are in PostgreSQL, which is backed up as "
            "docs/postgresql.md says"
        )
    elif not isinstance(store, EmbeddedStore):
        refusal = "a broker with --memory has nothing to back up"
    elif settings.backup_dir is None:
        refusal = (
            "this broker has no folder for backups: set backup_dir in [broker] of its configuration file, and start "
            "it again"
        )
    if refusal or not isinstance(store, EmbeddedStore):
        return Backups(refusal=refusal)
    has_users = configuration.users is not None
    return Backups(store, settings.data, settings.backup_dir, refusal="", has_users=has_users)


def _member_settings(configuration: Configuration, manager: ServiceManager, process: BrokerProcess) -> MemberSettings:
    settings = configuration.broker
    return MemberSettings(
        name=settings.member or machine.member_name(),
        folder=settings.data or Path(),
        failover_after_s=settings.failover_after_ms / 1000,
        users="" if configuration.users is None else configuration.users.digest,
        on_standing_by=partial(_report_standing_by, manager, process),
    )


def _report_standing_by(manager: ServiceManager, process: BrokerProcess, active: str) -> None:
    process.state = BrokerState.STANDING_BY
    text = f"standing by for {active}" if active else "standing by"
    print(text, flush=True)
    # Ready, although no client can connect: a broker may stand by for months, and its service manager would end a
    # start that takes so long.
    manager.ready(text)


def _open_log(settings: BrokerSettings, member: MemberSettings, *, take_over: bool) -> Log | None:
    """Open the log that the settings name; None if they name none.

    Raises: ConfigurationError if psycopg is missing, or the database cannot be used; StoreError if it cannot be read
    """
    if settings.store is None:
        return None
    assert settings.schema is not None and settings.database_limit is not None, "the command line was checked"
    return open_log(
        settings.store,
        settings.schema,
        take_over=take_over,
        is_replicated=settings.durability is Durability.REPLICATED,
        database_limit=settings.database_limit,
        patience_s=settings.database_patience_ms / 1000,
        member=member,
    )


def _apply_settings(member: MemberSettings, changed: Configuration) -> None:
    """Apply the changes that concern a broker that stands by, too."""
    if changed.users is not None:
        member.users = changed.users.digest
    _log_warnings(changed)
    logs.configure_logging(changed.broker.log_level.value, changed.broker.log_format)


def _apply_changes(
    tls: ListenerTls, exporter: HistoryExporter | None, process: BrokerProcess, broker: Broker, changed: Configuration
) -> None:
    process.set_metrics_queues(changed.broker.metrics_queues)
    broker.change_policies(changed.policies)
    broker.policy_source = changed.source
    if changed.users is not None:
        broker.users.replace(changed.users)
        broker.warnings.keep_users(changed.users)
    if changed.certificates is not None:
        tls.context = changed.certificates.context
    if exporter is not None:
        exporter.set_retention(bytes_max=changed.broker.history_bytes_max, days_max=changed.broker.history_days_max)


def fault_of_memory_limit(limit: int) -> str | None:
    """Return why this machine has too little memory for `limit` bytes; None if it has enough."""
    available = machine.memory_bytes()
    if limit <= available:
        return None
    return (
        f"a memory limit of {format_size(limit)} is more than the memory that this broker can have, "
        f"{available >> 20}MiB: the system would kill it before it reaches the limit; lower the limit "
        "(--memory-limit, or memory_limit in the configuration file)"
    )


def fault_of_backups(settings: BrokerSettings, check: Callable[[Path, Path], None]) -> str | None:
    """Return why no backup can be made in backup_dir; None if one can, or if there is none. `check` gets backup_dir and
    the data folder, and raises ConfigurationError or OSError for the first that cannot be used."""
    if settings.backup_dir is None:
        return None
    if settings.store is not None:
        return "backup_dir has no effect with messages in PostgreSQL, which is backed up as docs/postgresql.md says"
    try:
        check(settings.backup_dir, settings.data or Path(DEFAULT_DATA))
    except ConfigurationError as error:
        return str(error)
    except OSError as error:
        return f"backup_dir {settings.backup_dir} cannot be examined: {error.strerror}"
    return None


def _log_warnings(configuration: Configuration) -> None:
    for warning in () if configuration.users is None else configuration.users.warnings:
        logger.warning("users file can be read by other users of this machine", extra={"reason": warning})
    settings = configuration.broker
    fault = fault_of_backups(settings, check_backup_folder)
    if fault is not None:
        logger.warning("no backup can be made", extra={"reason": fault})
    if settings.store is not None and settings.durability is Durability.LOCAL:
        logger.warning(
            "messages are confirmed by one database alone: if its disk is lost, confirmed messages are lost",
            extra={"durability": settings.durability.value},
        )
    with_certificates = [each.user.name for each in (configuration.users or {}).values() if each.certificates]
    if with_certificates and settings.client_ca is None:
        logger.warning(
            "certificates of users have no effect without --client-ca",
            extra={"file": str(settings.users), "users": with_certificates},
        )
    if is_key_readable_by_others(settings):
        logger.warning(
            "private key can be read by other users of this machine: run `chmod 600` on it",
            extra={"file": str(settings.key or settings.certificate)},
        )
    if configuration.certificates is not None and configuration.certificates.fault is not None:
        file = str(settings.certificate)
        logger.warning(
            "clients refuse the certificate",
            extra={"file": file, "reason": configuration.certificates.fault},
        )


async def _run(
    make_broker: Callable[[asyncio.AbstractEventLoop], Broker],
    make_listener: Callable[..., Listener],
    addresses: Sequence[Address],
    tls: ListenerTls,
    reloader: Reloader | None,
    apply: Callable[[Broker, Configuration], None],
    manager: ServiceManager,
    process: BrokerProcess,
    configuration: Configuration,
    *,
    after_clean_stop: bool,
    identity: str,
) -> str | None:
    """Run the broker until a signal or a request ends it. Returns the name of the broker that takes over, if there was
    such a request.

    Raises: TruenextError if the broker has failed
    """
    places = raise_file_limit(len(addresses))
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _tune_garbage_collector()
    # Closed before the store in any case: the store's thread must not be in the middle of a batch then.
    broker = make_broker(loop)
    with closing(broker):
        loop.set_exception_handler(lambda _, context: broker.fail(_internal_error(context)))
        broker.failure.add_done_callback(lambda _: stop.set())
        broker.end = stop.set
        await broker.start(after_clean_stop=after_clean_stop, identity=identity)
        manager.feed_watchdog_from(loop)
        if reloader is not None:
            reloader.also_apply(partial(apply, broker))
            broker.reload = reloader.reload
            # Not `loop.add_signal_handler`: the loop would reload once more for a SIGHUP that was noted before.
            signal.signal(
                signal.SIGHUP, lambda *_: None if loop.is_closed() else loop.call_soon_threadsafe(broker.reload)
            )
            if early_signals.take_noted_sighup():
                # The loop calls it once all listeners are there.
                loop.call_soon(broker.reload)
        listeners: list[Listener] = []
        try:
            for address in addresses:
                used_tls = tls if address.has_tls else None
                listener = make_listener(address, broker, loop, places=places, tls=used_tls)
                listeners.append(listener)
            process.start(broker, loop, configuration.broker.metrics_queues)
            urls = [each.url for each in listeners]
            for url in urls:
                print(f"listening on {url}", flush=True)
            manager.ready(f"listening on {', '.join(urls)}")
            _log_start(configuration, urls, process.health_url)
            await stop.wait()
        finally:
            manager.stopping()
            process.state = BrokerState.STOPPING
            logger.info("broker stops")
            for listener in listeners:
                listener.stop_reading()
            # Also if an address cannot be listened on: transient messages stored by the last run must survive this one.
            if not broker.failure.done():
                await broker.stop()
            for listener in listeners:
                await listener.close()
        if broker.failure.done():
            broker.failure.result()
        broker.failure.cancel()
        return broker.heir


def _log_start(configuration: Configuration, urls: Sequence[str], health_url: str | None) -> None:
    settings, users = configuration.broker, configuration.users
    logger.info(
        "broker listens",
        extra={
            "listen": urls,
            "health": health_url,
            "version": VERSION,
            "folder": None if settings.data is None else str(settings.data),
            "users": None if users is None else len(users),
        },
    )


def _internal_error(context: dict[str, Any]) -> TruenextError:
    """Log an internal error, and return the error that ends the broker. After an internal error the broker's state may
    be wrong."""
    logger.critical("internal error", exc_info=context.get("exception"), extra={"reason": context["message"]})
    return TruenextError(f"internal error, the broker stops: {context.get('exception') or context['message']!r}")


def _tune_garbage_collector() -> None:
    """Make garbage collection rare, and exempt objects that live long. Objects made for each message form no cycles, so
    they need no collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
