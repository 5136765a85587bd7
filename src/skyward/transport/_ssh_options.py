"""Options of OpenSSH's client: which ones Skyward obeys, and which ones cannot matter to it.

One in neither set is refused by name where it is set. ``docs/machines-of-your-own.md`` lists both.
"""

from __future__ import annotations

from typing import Final

__all__ = ["IGNORED", "OBEYED"]

OBEYED: Final = frozenset(
    {
        "addressfamily",
        "bindaddress",
        "bindinterface",
        "canonicaldomains",
        "canonicalizefallbacklocal",
        "canonicalizehostname",
        "canonicalizemaxdots",
        "canonicalizepermittedcnames",
        "casignaturealgorithms",
        "certificatefile",
        "checkhostip",
        "ciphers",
        "connecttimeout",
        "globalknownhostsfile",
        "host",
        "hostkeyalgorithms",
        "hostkeyalias",
        "hostname",
        "identitiesonly",
        "identityagent",
        "identityfile",
        "ignoreunknown",
        "kexalgorithms",
        "knownhostscommand",
        "macs",
        "nohostauthenticationforlocalhost",
        "pkcs11provider",
        "port",
        "preferredauthentications",
        "proxycommand",
        "proxyjump",
        "proxyusefdpass",
        "pubkeyacceptedalgorithms",
        "pubkeyauthentication",
        "refuseconnection",
        "rekeylimit",
        "requiredrsasize",
        "revokedhostkeys",
        "stricthostkeychecking",
        "tag",
        "user",
        "userknownhostsfile",
        "verifyhostkeydns",
    }
)
"""Options that count: they are obeyed, or the error names them."""

IGNORED: Final = frozenset(
    {
        # other ways to log in than with keys
        "batchmode",
        "challengeresponseauthentication",
        "enablesshkeysign",
        "gssapiauthentication",
        "gssapiclientidentity",
        "gssapidelegatecredentials",
        "gssapikexalgorithms",
        "gssapikeyexchange",
        "gssapirenewalforcesrekey",
        "gssapiserveridentity",
        "gssapitrustdns",
        "hostbasedacceptedalgorithms",
        "hostbasedauthentication",
        "hostbasedkeytypes",
        "kbdinteractiveauthentication",
        "kbdinteractivedevices",
        "numberofpasswordprompts",
        "passwordauthentication",
        "securitykeyprovider",
        # what ssh writes down
        "addkeystoagent",
        "hashknownhosts",
        "updatehostkeys",
        # the session of a person at a terminal
        "enableescapecommandline",
        "escapechar",
        "fingerprinthash",
        "forkafterauthentication",
        "localcommand",
        "loglevel",
        "logverbose",
        "obscurekeystroketiming",
        "permitlocalcommand",
        "remotecommand",
        "requesttty",
        "sendenv",
        "sessiontype",
        "setenv",
        "stdinnull",
        "syslogfacility",
        "usekeychain",
        "versionaddendum",
        "visualhostkey",
        "warnweakcrypto",
        # forwards, which Skyward makes itself, and shared connections
        "clearallforwardings",
        "controlmaster",
        "controlpath",
        "controlpersist",
        "dynamicforward",
        "exitonforwardfailure",
        "forwardagent",
        "forwardx11",
        "forwardx11timeout",
        "forwardx11trusted",
        "gatewayports",
        "localforward",
        "permitremoteopen",
        "remoteforward",
        "streamlocalbindmask",
        "streamlocalbindunlink",
        "tunnel",
        "tunneldevice",
        "xauthlocation",
        # speed, and when a silent machine counts as lost, which Skyward decides
        "channeltimeout",
        "compression",
        "connectionattempts",
        "ipqos",
        "serveralivecountmax",
        "serveraliveinterval",
        "tcpkeepalive",
    }
)
"""Options that are ignored, by the reason."""
