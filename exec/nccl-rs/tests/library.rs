//! A real library, where there is one: what works without a GPU.

use nccl_rs::{Code, Nccl, Search};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// The library that `NCCL_RS_LIB` names, or that python's packages or the system have. Without any the test says so, and
/// says it where nobody misses it.
fn library() -> Option<Nccl> {
    let python = Command::new("python3")
        .args([
            "-c",
            "import site; print(*site.getsitepackages(), sep='\\n')",
        ])
        .output();
    let site_packages = python.map_or_else(
        |_| Vec::new(),
        |o| {
            String::from_utf8_lossy(&o.stdout)
                .lines()
                .map(PathBuf::from)
                .collect()
        },
    );
    let search = Search {
        site_packages,
        ..Search::default()
    };
    match Nccl::load(&search) {
        Ok(nccl) => Some(nccl),
        Err(e) => {
            assert!(
                std::env::var_os(nccl_rs::ENVIRONMENT).is_none(),
                "{} is set: {e}",
                nccl_rs::ENVIRONMENT
            );
            // Not by a macro: the test harness would swallow it.
            let _ = writeln!(
                std::io::stderr(),
                "\n*** SKIPPED: no NCCL on this machine, nothing of a real library was tested ***\n{e}\n"
            );
            None
        }
    }
}

#[test]
fn what_works_without_a_gpu() {
    let Some(nccl) = library() else { return };
    eprintln!("{nccl:?}");
    let version = nccl.version();
    assert_eq!(version.major, 2, "{version}");
    let words = nccl.error_string(Code::INVALID_USAGE);
    assert!(words.contains("invalid usage"), "{words}");
    for symbol in nccl_rs::ffi::Functions::REQUIRED {
        assert!(nccl.has(symbol), "{symbol}");
    }
    if (version.major, version.minor) >= (2, 28) {
        for symbol in [
            "ncclCommWindowRegister",
            "ncclAlltoAll",
            "ncclGroupSimulateEnd",
        ] {
            assert!(nccl.has(symbol), "{symbol}");
        }
    }
    // An identity needs a network interface, which a machine need not have.
    match (nccl.unique_id(), nccl.unique_id()) {
        (Ok(a), Ok(b)) => assert_ne!(a, b),
        (a, b) => {
            let error = a.and(b).unwrap_err();
            assert!(error.code().is_some(), "{error}");
            eprintln!("*** no unique id: {error} ***");
        }
    }
    nccl.group(|| Ok::<(), nccl_rs::Error>(())).unwrap();
}

/// NCCL starts threads that stay, so its code has to.
#[test]
fn the_library_outlives_its_handles() {
    let Some(nccl) = library() else { return };
    let _ = nccl.unique_id();
    drop(nccl);
    // Where the threads would find their code gone.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    assert!(maps.is_empty() || maps.contains("libnccl"));
}
