"""Several machines as one Mesos: daemons with virtual loopback addresses, joined by gateways over TLS."""
