# The only list of these names, each with its home; __init__.py reads it at run time.

from skyward.machine.access import Access as Access
from skyward.machine.access import Completed as Completed
from skyward.machine.access import Transport as Transport
from skyward.machine.local import LocalAccess as LocalAccess
from skyward.machine.ssh import SSHAccess as SSHAccess
from skyward.machine.ssh_config import SSHTarget as SSHTarget
from skyward.providers._common.create_once import MachineCalls as MachineCalls
from skyward.providers._common.create_once import create_once as create_once
from skyward.providers._common.logins import KeyPair as KeyPair
from skyward.providers._common.logins import host_key as host_key
from skyward.providers._common.logins import user_key as user_key
from skyward.providers._common.machine_boot import cloud_config as cloud_config
from skyward.providers.base import REFUSALS as REFUSALS
from skyward.providers.base import Finding as Finding
from skyward.providers.base import Instance as Instance
from skyward.providers.base import InstanceState as InstanceState
from skyward.providers.base import LaunchOrder as LaunchOrder
from skyward.providers.base import MachineSecret as MachineSecret
from skyward.providers.base import Offer as Offer
from skyward.providers.base import Provider as Provider
from skyward.providers.local import INSTANCE_VARIABLE as INSTANCE_VARIABLE
from skyward.request.instance import InstanceSpec as InstanceSpec
from skyward.request.request import PoolRequest as PoolRequest
from skyward.wire.node_config import PreemptionWatch as PreemptionWatch
