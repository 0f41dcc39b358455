//! Several ranks on one GPU, to try on one what is meant for several: NCCL takes ranks that name hosts of their own for those of
//! a cluster, and joins them by sockets.
//!
//! What ranks compute, say to one another and do when one of them fails is as on several GPUs. Times are not: kernels of different
//! processes take turns, and what is exchanged goes through the hosts' memory. There are no copy engines between hosts, so
//! collectives that a scenario puts on them are kernels.

/// What NCCL reads from the environment for a rank that shares its GPU.
///
/// `NCCL_HOSTID` stands in for the host's name (NCCL refuses two ranks of one host on the same GPU); the others keep what ranks
/// exchange on this machine, and away from what only real clusters have.
#[must_use]
pub fn variables(rank: u32) -> [(&'static str, String); 4] {
    [
        (HOST, format!("shardlab-rank-{rank}")),
        ("NCCL_NET", "Socket".to_owned()),
        ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
        ("NCCL_MNNVL_ENABLE", "0".to_owned()),
    ]
}

/// Tells by its presence that [`variables`] are set.
pub const HOST: &str = "NCCL_HOSTID";
