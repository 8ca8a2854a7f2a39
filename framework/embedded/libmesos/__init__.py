"""What the daemons of an embedded cluster call of Mesos; needs the standard library only."""
