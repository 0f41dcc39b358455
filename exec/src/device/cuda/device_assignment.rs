//! Which GPU a process takes, and that no two take the same.

use super::context::{device, gpus, visible};
use super::driver::check;
use crate::process::Peers;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// First GPU of a process with `ranks` ranks, where `count` are shown to it: the host's processes share them in order of
/// their `place`, from `base` on. A launcher that shows each of several processes only what is its own (Slurm's
/// `--gpus-per-task`) has shared them already.
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

/// The GPU of a process that may share it: processes take those from `base` on in turn.
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

/// Whether so many ranks of one host find a GPU each, from `base` on: before any of them is started.
///
/// # Errors
/// In words, if there are fewer; [`super::NoGpu`]'s, if there are none to be used.
pub fn room(library_path: &[PathBuf], base: u32, ranks: u32) -> Result<(), String> {
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

/// Makes sure that no two processes have the same GPU: NCCL would say so later, and less clearly.
pub(super) fn apart(peers: &Peers, gpus: Range<u32>) -> Result<(), String> {
    if peers.processes() == 1 {
        return Ok(());
    }
    let mine = gpus.map(identity).collect::<Result<Vec<_>, _>>()?;
    let all = peers
        .all_gather("gpus", mine.concat())
        .map_err(|e| e.to_string())?;
    shared(&all)
}

/// The 16 bytes that tell a GPU from all others.
fn identity(gpu: u32) -> Result<Vec<u8>, String> {
    let device = device(gpu).map_err(|e| e.to_string())?;
    let mut id = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver writes 16 bytes where it is told to.
    check("cuDeviceGetUuid", unsafe {
        sys::cuDeviceGetUuid_v2(&raw mut id, device)
    })
    .map_err(|e| e.to_string())?;
    Ok(id.bytes.iter().map(|b| *b as u8).collect())
}

/// Refuses two processes with one GPU. `all` has the identities of each process's GPUs.
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
        // Own launcher, torchrun: everybody sees all.
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
        // None of them is started where they find no room.
        let why = too_few(0, 1024, "", 1);
        assert!(
            why.starts_with("GPUs 0 to 1023 are needed, one GPU per rank, but the driver shows 1"),
            "{why}"
        );
        // A GPU that was asked for is not replaced by another.
        assert!(first(1, 0, 1, 1, 2).is_err());
        // Shared: in turn, from the first that was asked for.
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
