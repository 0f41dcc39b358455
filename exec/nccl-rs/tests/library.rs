//! Tests of a real library: what works without a GPU, and what only the library knows about the
//! interface.
//!
//! They are ignored by default, because they need NCCL. To run them, install it (`pip install
//! nvidia-nccl-cu13`) or name it in `NCCL_RS_LIB`, and pass `--ignored` or `--include-ignored`.

mod header;

use header::Header;
use nccl_rs::ffi::{
    Functions, HOST_IMMEDIATE, IN_PROGRESS, NO_COLOR, RawConfig, RawSimInfo, RawUniqueId, SUCCESS,
};
use nccl_rs::{Code, Communicator, Config, DataType, Nccl, RedOp, Search};
use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Loads the library that `NCCL_RS_LIB` names, or that Python's packages or the system have.
fn library() -> Nccl {
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
    Nccl::load(&search).unwrap_or_else(|e| panic!("this test needs NCCL: {e}"))
}

/// Reads the header of the library, which pip's packages have in a folder next to it.
fn header(library: &Path) -> Header {
    let file = library.parent().unwrap().join("../include/nccl.h");
    let text = std::fs::read_to_string(&file);
    Header(text.unwrap_or_else(|e| panic!("this test needs {}: {e}", file.display())))
}

#[test]
#[ignore = "needs NCCL"]
fn what_works_without_a_gpu() {
    let nccl = library();
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
    // A unique id needs a network interface, which some machines lack.
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

/// NCCL starts threads that never end, so its code must stay loaded.
#[test]
#[ignore = "needs NCCL"]
fn the_library_outlives_its_handles() {
    let nccl = library();
    let _ = nccl.unique_id();
    drop(nccl);
    // The threads would crash if their code were unloaded.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    assert!(maps.is_empty() || maps.contains("libnccl"));
}

/// The library rejects a struct if its magic number is at another offset.
#[test]
#[ignore = "needs NCCL"]
fn the_library_takes_the_struct_of_estimates() {
    let nccl = library();
    let Some(end) = nccl.functions().group_simulate_end else {
        let version = nccl.version();
        assert!((version.major, version.minor) < (2, 22), "{version}");
        return;
    };
    assert_eq!(nccl.simulate(|| Ok::<(), nccl_rs::Error>(())), Ok(None));
    let attempt = |info: &mut RawSimInfo| {
        // SAFETY: an empty group is opened and ended, and the struct is valid for writes.
        unsafe {
            assert_eq!((nccl.functions().group_start)(), SUCCESS);
            Code(end(info))
        }
    };
    assert_eq!(attempt(&mut RawSimInfo::initial()), Code::SUCCESS);
    let mut wrong = RawSimInfo::initial();
    wrong.magic ^= 1;
    assert_eq!(attempt(&mut wrong), Code::INVALID_ARGUMENT);
    // It copies no more than the struct's size: here, not even the magic number.
    let mut short = RawSimInfo::initial();
    short.size = offset_of!(RawSimInfo, magic);
    assert_eq!(attempt(&mut short), Code::INVALID_ARGUMENT);
}

/// The same holds for configurations, which it reads once it has found a GPU.
#[test]
#[ignore = "needs NCCL and a GPU"]
fn the_library_takes_the_struct_of_configurations() {
    let nccl = library();
    let id = nccl.unique_id().unwrap();
    // On a separate thread: without a GPU, NCCL fails before it ends the group that it began.
    std::thread::spawn(move || {
        type Change<'a> = &'a dyn Fn(&mut RawConfig);
        let comm = Communicator::init(&nccl, &id, 1, 0, Config::default());
        comm.unwrap_or_else(|e| panic!("this test needs a GPU: {e}"))
            .destroy()
            .unwrap();
        let attempt = |change: Change<'_>| {
            let id = nccl.unique_id().unwrap();
            let id = RawUniqueId {
                internal: id.as_bytes().map(|b| b as c_char),
            };
            let mut config = RawConfig::initial();
            change(&mut config);
            let mut comm = std::ptr::null_mut();
            let f = nccl.functions();
            // SAFETY: the locations and the configuration live during the call.
            let result =
                unsafe { (f.comm_init_rank_config)(&raw mut comm, 1, id, 0, &raw mut config) };
            if result == SUCCESS {
                // SAFETY: it has just been created.
                unsafe { (f.comm_destroy)(comm) };
            }
            Code(result)
        };
        assert_eq!(attempt(&|_| ()), Code::SUCCESS);
        // Each invalid value is rejected, so it is at the offset that the library reads.
        let wrong: [(&str, Change<'_>); 8] = [
            ("magic", &|c| c.magic ^= 1),
            ("blocking", &|c| c.blocking = 2),
            ("cluster size", &|c| c.cga_cluster_size = -2),
            ("fewest blocks", &|c| c.min_ctas = 0),
            ("split share", &|c| c.split_share = 2),
            ("in-network reductions", &|c| c.collnet_enable = 2),
            ("policy", &|c| c.cta_policy = 1000),
            ("channels", &|c| c.channels_per_net_peer = -1),
        ];
        for (name, change) in wrong {
            assert_eq!(attempt(change), Code::INVALID_ARGUMENT, "{name}");
        }
        // A field that is newer than the struct's version is not read.
        let old = attempt(&|c| (c.version, c.cta_policy) = (21_400, 1000));
        assert_eq!(old, Code::SUCCESS);
    })
    .join()
    .unwrap();
}

/// Structs, numbers and functions match the header of the loaded library.
#[test]
#[ignore = "needs NCCL and its header"]
fn the_header_is_the_one_that_was_written_down() {
    let nccl = library();
    let header = header(nccl.path());
    let parts = ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"].map(|n| header.number(n));
    let version = nccl.version();
    assert_eq!(
        parts,
        [version.major, version.minor, version.patch].map(|x| Some(x.into())),
        "the header is not the library's"
    );
    let config = [
        ("size", offset_of!(RawConfig, size)),
        ("magic", offset_of!(RawConfig, magic)),
        ("version", offset_of!(RawConfig, version)),
        ("blocking", offset_of!(RawConfig, blocking)),
        ("cgaClusterSize", offset_of!(RawConfig, cga_cluster_size)),
        ("minCTAs", offset_of!(RawConfig, min_ctas)),
        ("maxCTAs", offset_of!(RawConfig, max_ctas)),
        ("netName", offset_of!(RawConfig, net_name)),
        ("splitShare", offset_of!(RawConfig, split_share)),
        ("trafficClass", offset_of!(RawConfig, traffic_class)),
        ("commName", offset_of!(RawConfig, comm_name)),
        ("collnetEnable", offset_of!(RawConfig, collnet_enable)),
        ("CTAPolicy", offset_of!(RawConfig, cta_policy)),
        ("shrinkShare", offset_of!(RawConfig, shrink_share)),
        ("nvlsCTAs", offset_of!(RawConfig, nvls_ctas)),
        (
            "nChannelsPerNetPeer",
            offset_of!(RawConfig, channels_per_net_peer),
        ),
        (
            "nvlinkCentricSched",
            offset_of!(RawConfig, nvlink_centric_sched),
        ),
    ];
    let sim = [
        ("size", offset_of!(RawSimInfo, size)),
        ("magic", offset_of!(RawSimInfo, magic)),
        ("version", offset_of!(RawSimInfo, version)),
        ("estimatedTime", offset_of!(RawSimInfo, estimated_time)),
    ];
    let now = RawConfig::initial().version;
    let code = version.major * 10_000 + version.minor * 100 + version.patch;
    let structs = [
        ("ncclConfig_t", &config[..], size_of::<RawConfig>()),
        ("ncclSimInfo_t", &sim[..], size_of::<RawSimInfo>()),
    ];
    for (name, ours, bytes) in structs {
        let theirs = header.fields(name);
        // Versions add fields at the end; a library reads those that both have.
        for (a, b) in ours.iter().zip(&theirs.fields) {
            assert_eq!(*a, (b.0.as_str(), b.1), "{name}");
        }
        if code >= now {
            assert!(theirs.fields.len() >= ours.len(), "{name}");
        }
        if code == now {
            assert_eq!((theirs.fields.len(), theirs.bytes), (ours.len(), bytes));
        }
    }
    let numbers: [(&str, c_int); 36] = [
        ("ncclSuccess", Code::SUCCESS.0),
        ("ncclUnhandledCudaError", Code::UNHANDLED_CUDA_ERROR.0),
        ("ncclSystemError", Code::SYSTEM_ERROR.0),
        ("ncclInternalError", Code::INTERNAL_ERROR.0),
        ("ncclInvalidArgument", Code::INVALID_ARGUMENT.0),
        ("ncclInvalidUsage", Code::INVALID_USAGE.0),
        ("ncclRemoteError", Code::REMOTE_ERROR.0),
        ("ncclInProgress", IN_PROGRESS),
        ("ncclInt8", DataType::I8.0),
        ("ncclUint8", DataType::U8.0),
        ("ncclInt32", DataType::I32.0),
        ("ncclUint32", DataType::U32.0),
        ("ncclInt64", DataType::I64.0),
        ("ncclUint64", DataType::U64.0),
        ("ncclFloat16", DataType::F16.0),
        ("ncclFloat32", DataType::F32.0),
        ("ncclFloat64", DataType::F64.0),
        ("ncclBfloat16", DataType::BF16.0),
        ("ncclFloat8e4m3", DataType::F8E4M3.0),
        ("ncclFloat8e5m2", DataType::F8E5M2.0),
        ("ncclSum", RedOp::SUM.0),
        ("ncclProd", RedOp::PROD.0),
        ("ncclMax", RedOp::MAX.0),
        ("ncclMin", RedOp::MIN.0),
        ("ncclAvg", RedOp::AVG.0),
        ("ncclScalarHostImmediate", HOST_IMMEDIATE),
        ("NCCL_SPLIT_NOCOLOR", NO_COLOR),
        ("NCCL_UNIQUE_ID_BYTES", nccl_rs::UniqueId::BYTES as c_int),
        ("NCCL_WIN_DEFAULT", 0),
        ("NCCL_WIN_COLL_SYMMETRIC", 1),
        ("NCCL_WIN_REQUIRED_ALIGNMENT", 4096),
        ("NCCL_CTA_POLICY_DEFAULT", 0),
        ("NCCL_CTA_POLICY_EFFICIENCY", 1),
        ("NCCL_CTA_POLICY_ZERO", 2),
        ("NCCL_SHRINK_DEFAULT", 0),
        ("NCCL_REVOKE_DEFAULT", 0),
    ];
    for (name, ours) in numbers {
        let theirs = header.number(name);
        if code >= now {
            assert!(theirs.is_some(), "{name} is not in the header");
        }
        assert_eq!(theirs.unwrap_or(ours.into()), i64::from(ours), "{name}");
    }
    for name in Functions::REQUIRED.iter().chain(Functions::OPTIONAL) {
        assert_eq!(header.declares(name), nccl.has(name), "{name}");
    }
}
