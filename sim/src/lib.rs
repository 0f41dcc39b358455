//! shardlab-sim: a discrete-event simulator of FSDP programs.
