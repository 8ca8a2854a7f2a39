"""The Mesos executor and its slots, which run the processes of training jobs and of trials."""
