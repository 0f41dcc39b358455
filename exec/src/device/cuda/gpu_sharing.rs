//! Several ranks on one GPU, for functional tests of programs for several GPUs. NCCL treats ranks
//! with different host ids as hosts of a cluster, and connects them by sockets.
//!
//! Results, messages and failure handling are the same as on several GPUs. Timings are meaningless:
//! kernels of different processes take turns, and data are exchanged through host memory. Copy
//! engines do not work between hosts, so collectives on copy engines become kernels.

/// Returns the environment variables of NCCL for a rank that shares its GPU.
///
/// `NCCL_HOSTID` replaces the host's name, because NCCL rejects two ranks of one host on the same
/// GPU. The other variables keep the traffic on this machine and disable features of real clusters.
#[must_use]
pub fn variables(rank: u32) -> [(&'static str, String); 4] {
    [
        (HOST, format!("shardlab-rank-{rank}")),
        ("NCCL_NET", "Socket".to_owned()),
        ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
        ("NCCL_MNNVL_ENABLE", "0".to_owned()),
    ]
}

/// Variable whose presence shows that [`variables`] are set.
pub const HOST: &str = "NCCL_HOSTID";
