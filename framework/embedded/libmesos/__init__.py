"""Bindings to Mesos for the daemons of an embedded cluster; needs only the standard library."""
