//! A real library, where there is one: what works without a GPU, and what only it knows of the interface. Its header, where
//! it lies beside it as in pip's packages.

mod header;

use header::Header;
use nccl_rs::ffi::{
    Functions, HOST_IMMEDIATE, IN_PROGRESS, NO_COLOR, RawConfig, RawSimInfo, RawUniqueId, SUCCESS,
};
use nccl_rs::{Code, Communicator, Config, DataType, Nccl, RedOp, Search};
use std::ffi::{c_char, c_int};
use std::io::Write;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
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
            skipped(&format!(
                "no NCCL on this machine, nothing of a real library was tested ***\n{e}\n***"
            ));
            None
        }
    }
}

/// Not by a macro: the test harness would swallow it.
fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "\n*** SKIPPED: {what} ***\n");
}

/// The header of the library, beside which pip's packages have it.
fn header(library: &Path) -> Option<Header> {
    let file = library.parent()?.join("../include/nccl.h");
    let text = std::fs::read_to_string(&file).ok();
    if text.is_none() {
        skipped(&format!("no header at {}", file.display()));
    }
    text.map(Header)
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

/// The library refuses a struct whose identifying number is not where it looks for it.
#[test]
fn the_library_takes_the_struct_of_estimates() {
    let Some(nccl) = library() else { return };
    let Some(end) = nccl.functions().group_simulate_end else {
        return skipped("no ncclGroupSimulateEnd");
    };
    assert_eq!(nccl.simulate(|| Ok::<(), nccl_rs::Error>(())), Ok(None));
    let attempt = |info: &mut RawSimInfo| {
        // SAFETY: a group of nothing is opened and ended, and the struct is valid for writes.
        unsafe {
            assert_eq!((nccl.functions().group_start)(), SUCCESS);
            Code(end(info))
        }
    };
    assert_eq!(attempt(&mut RawSimInfo::initial()), Code::SUCCESS);
    let mut wrong = RawSimInfo::initial();
    wrong.magic ^= 1;
    assert_eq!(attempt(&mut wrong), Code::INVALID_ARGUMENT);
    // It copies no more than the struct says that it has: here, not even the number.
    let mut short = RawSimInfo::initial();
    short.size = offset_of!(RawSimInfo, magic);
    assert_eq!(attempt(&mut short), Code::INVALID_ARGUMENT);
}

/// Likewise for configurations, which it looks at once it has found a GPU.
#[test]
fn the_library_takes_the_struct_of_configurations() {
    let Some(nccl) = library() else { return };
    let Ok(id) = nccl.unique_id() else {
        return skipped("no unique id, so no configuration was looked at");
    };
    // On a thread of its own: without a GPU NCCL fails before it ends the group that it began.
    std::thread::spawn(move || {
        type Change<'a> = &'a dyn Fn(&mut RawConfig);
        match Communicator::init(&nccl, &id, 1, 0, Config::default()) {
            Ok(comm) => comm.destroy().unwrap(),
            Err(e) if e.code() == Some(Code::UNHANDLED_CUDA_ERROR) => {
                return skipped("no GPU, so the library looked at no configuration");
            }
            Err(e) => panic!("{e}"),
        }
        let attempt = |change: Change<'_>| {
            let id = nccl.unique_id().unwrap();
            let id = RawUniqueId {
                internal: id.as_bytes().map(|b| b as c_char),
            };
            let mut config = RawConfig::initial();
            change(&mut config);
            let mut comm = std::ptr::null_mut();
            let f = nccl.functions();
            // SAFETY: the places and the configuration live meanwhile.
            let result =
                unsafe { (f.comm_init_rank_config)(&raw mut comm, 1, id, 0, &raw mut config) };
            if result == SUCCESS {
                // SAFETY: it has just been made.
                unsafe { (f.comm_destroy)(comm) };
            }
            Code(result)
        };
        assert_eq!(attempt(&|_| ()), Code::SUCCESS);
        // Each number is refused where it is, so it is where the library looks.
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
        // Of a version that knew none of it, a field is not looked at.
        let old = attempt(&|c| (c.version, c.cta_policy) = (21_400, 1000));
        assert_eq!(old, Code::SUCCESS);
    })
    .join()
    .unwrap();
}

/// Structs, numbers and functions as the header of the loaded library has them.
#[test]
fn the_header_is_the_one_that_was_written_down() {
    let Some(nccl) = library() else { return };
    let Some(header) = header(nccl.path()) else {
        return;
    };
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
        // Versions add fields at the end; a library takes those that both have.
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
