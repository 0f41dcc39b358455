//! Assigns GPUs to processes, and checks that no two processes use the same GPU.

use super::context::{device, gpus, visible};
use super::driver::check;
use crate::process::ProcessGroup;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// Returns the first GPU of a process with `ranks` ranks that sees `count` GPUs. The processes of a
/// host divide the GPUs in the order of `place`, starting at `base`. A launcher that shows each
/// process only its own GPUs (Slurm's `--gpus-per-task`) has already divided them.
pub(super) fn first(
    base: u32,
    place: u32,
    ranks: u32,
    count: u32,
    processes: u32,
) -> Result<u32, String> {
    let first = base + place * ranks;
    if first + ranks <= count {
        return Ok(first);
    }
    if processes > 1 && base == 0 && count == ranks {
        return Ok(0);
    }
    Err(too_few(
        first,
        ranks,
        &format!(" for process {place} of this host"),
        count,
    ))
}

/// Returns the GPU of a process that may share it. Processes use the GPUs from `base` on in turn.
pub(super) fn in_turn(base: u32, place: u32, ranks: u32, count: u32) -> Result<u32, String> {
    if ranks > 1 {
        return Err(format!(
            "{ranks} ranks of one process cannot share a GPU: NCCL needs one process per rank"
        ));
    }
    match count.checked_sub(base) {
        None | Some(0) => Err(too_few(base, 1, "", count)),
        Some(gpus) => Ok(base + place % gpus),
    }
}

/// Checks, before ranks are started, that a host has a GPU for each of them, starting at `base`.
///
/// # Errors
/// Returns a message if there are fewer, or that of [`super::GpuError`] if no GPU can be used.
pub fn check_gpus(library_path: &[PathBuf], base: u32, ranks: u32) -> Result<(), String> {
    let count = gpus(library_path).map_err(|e| e.to_string())?;
    if u64::from(base) + u64::from(ranks) <= u64::from(count) {
        Ok(())
    } else {
        Err(too_few(base, ranks, "", count))
    }
}

fn too_few(first: u32, ranks: u32, whom: &str, count: u32) -> String {
    let wanted = match ranks {
        1 => format!("GPU {first} is"),
        n => format!("GPUs {first} to {} are", first.saturating_add(n - 1)),
    };
    let visible = visible();
    format!(
        "{wanted} needed{whom}, one GPU per rank, but the driver shows {count}{visible}: use fewer ranks (mesh.dp_shard) or more GPUs"
    )
}

/// Checks that no two processes use the same GPU. NCCL would report this later and less clearly.
pub(super) fn check_distinct(peers: &ProcessGroup, gpus: Range<u32>) -> Result<(), String> {
    if peers.processes() == 1 {
        return Ok(());
    }
    let mine = gpus.map(identity).collect::<Result<Vec<_>, _>>()?;
    let all = peers
        .all_gather("gpus", mine.concat())
        .map_err(|e| e.to_string())?;
    shared(&all)
}

/// Returns the 16 bytes that identify a GPU.
fn identity(gpu: u32) -> Result<Vec<u8>, String> {
    let device = device(gpu).map_err(|e| e.to_string())?;
    let mut id = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the output has 16 bytes.
    check("cuDeviceGetUuid", unsafe {
        sys::cuDeviceGetUuid_v2(&raw mut id, device)
    })
    .map_err(|e| e.to_string())?;
    Ok(id.bytes.iter().map(|b| *b as u8).collect())
}

/// Rejects two processes with the same GPU. `all` has the identities of each process's GPUs.
fn shared(all: &[Vec<u8>]) -> Result<(), String> {
    let mut owners: BTreeMap<&[u8], usize> = BTreeMap::new();
    for (process, gpus) in all.iter().enumerate() {
        for gpu in gpus.chunks(16) {
            if let Some(other) = owners.insert(gpu, process) {
                return Err(format!(
                    "processes {other} and {process} would use the same GPU, but each rank needs its own: there are too few GPUs, or the launcher shows several processes the same one (CUDA_VISIBLE_DEVICES)"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_take_gpus_in_order_or_what_their_launcher_shows_them() {
        // shardlab's launcher and torchrun: every process sees all GPUs.
        assert_eq!(first(0, 3, 1, 4, 4), Ok(3));
        assert_eq!(first(4, 3, 1, 8, 4), Ok(7));
        // All ranks in one process.
        assert_eq!(first(0, 0, 4, 4, 1), Ok(0));
        // Slurm with --gpus-per-task 1.
        assert_eq!(first(0, 3, 1, 1, 8), Ok(0));
        let why = first(0, 3, 1, 2, 4).unwrap_err();
        assert!(
            why.starts_with("GPU 3 is needed") && why.contains("shows 2"),
            "{why}"
        );
        let why = first(0, 0, 4, 2, 1).unwrap_err();
        assert!(why.starts_with("GPUs 0 to 3 are needed"), "{why}");
        // The check before ranks are started.
        let why = too_few(0, 1024, "", 1);
        assert!(
            why.starts_with("GPUs 0 to 1023 are needed, one GPU per rank, but the driver shows 1"),
            "{why}"
        );
        // A requested GPU is not replaced by another one.
        assert!(first(1, 0, 1, 1, 2).is_err());
        // Shared: in turn, starting at the first requested GPU.
        let turns = |base, count| (0..4).map(move |p| in_turn(base, p, 1, count));
        let all = |base, count| turns(base, count).collect::<Result<Vec<_>, _>>();
        assert_eq!(all(0, 1), Ok(vec![0, 0, 0, 0]));
        assert_eq!(all(1, 3), Ok(vec![1, 2, 1, 2]));
        assert!(
            in_turn(1, 0, 1, 1)
                .unwrap_err()
                .starts_with("GPU 1 is needed")
        );
        assert!(
            in_turn(0, 0, 2, 2)
                .unwrap_err()
                .starts_with("2 ranks of one process")
        );
    }

    #[test]
    fn one_gpu_for_two_processes_is_refused() {
        let gpu = |n: u8| vec![n; 16];
        assert_eq!(shared(&[gpu(1), [gpu(2), gpu(3)].concat()]), Ok(()));
        let why = shared(&[gpu(1), gpu(2), gpu(1)]).unwrap_err();
        assert!(why.starts_with("processes 0 and 2 "), "{why}");
    }
}
