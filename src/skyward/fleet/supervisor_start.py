"""Starting a node's supervisor, whatever becomes of the link meanwhile."""

from __future__ import annotations

import asyncio

from skyward.environment.bootstrap import Environment, persist
from skyward.errors import BootstrapError, UnreachableError
from skyward.fleet.template_process import added_packages, fork_supervisor
from skyward.machine.access import Completed, Transport
from skyward.node.processes import SUPERVISOR_LOG
from skyward.node.supervisor.start_order import VISIBLE
from skyward.wire.node_config import MIG_START_S, NodeConfig, NodeReady

_START_TIMEOUT_S = 60.0
_END_ALL = "import sys; from skyward.node.processes import kill_all; kill_all(sys.argv[1])"


async def start_supervisor(
    transport: Transport,
    environment: Environment,
    config: NodeConfig,
    *,
    on_this_machine: bool = False,
    is_used: bool = False,
) -> NodeReady:
    """Start the supervisor on a prepared machine and return its ports.

    Args:
        transport: the way to the machine.
        environment: interpreter and variables.
        config: the node.
        on_this_machine: whether the machine is the client's: then the supervisor is a fork, where one can be made.
        is_used: whether another client may have started one there before it was killed.

    Raises:
        BootstrapError: the supervisor did not start; holds its output.
    """
    env = {**environment.env, "SKYWARD_INSTANCE": config.instance_id}
    if on_this_machine and not environment.isolated:
        env |= added_packages(env)
    limit_s = _START_TIMEOUT_S + (MIG_START_S if config.mig else 0.0)
    tried = is_used

    async def start(left_s: float) -> Completed:
        nonlocal tried
        if tried:  # the link dropped, or its client was killed: what came up has ports that no client knows
            await transport.run(environment.command("-c", _END_ALL, config.instance_id), timeout_s=left_s)
        tried = True
        if on_this_machine and not environment.isolated:
            try:
                async with asyncio.timeout(limit_s):
                    ready = await fork_supervisor(config, env)
            except TimeoutError as error:
                raise UnreachableError(f"the supervisor did not answer within {limit_s:g} s on this machine") from error
            if ready:
                return Completed(exit_code=0, stdout=ready, stderr="")
            if ready is not None:
                await transport.run(environment.command("-c", _END_ALL, config.instance_id), timeout_s=left_s)
        argv = environment.command("-m", "skyward.node.supervisor", config.workdir)
        argv += (VISIBLE,) if on_this_machine else ()
        # Through its input, for it holds a private key: never in a file or an argument.
        return await transport.run(argv, env=env, stdin=config.to_json().encode(), timeout_s=limit_s)

    completed = await persist(start, deadline_s=limit_s, node=config.node, step="server")
    try:
        return NodeReady.from_json(completed.stdout)
    except (ValueError, KeyError, TypeError) as error:
        log_path = f"{config.workdir}/{SUPERVISOR_LOG}"
        raise BootstrapError(
            f"the supervisor of node {config.node} did not start (exit code {completed.exit_code}); "
            f"its log is {log_path}\n{completed.stderr.strip() or completed.stdout.strip()}",
            node=config.node,
            step="server",
            log_tail=completed.stderr,
            log_path=log_path,
        ) from error
