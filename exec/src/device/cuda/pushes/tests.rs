use super::windows::Window;
use super::*;
use shardlab_plan::ir::DType;

/// Returns a small program whose experts are divided among two of four ranks.
fn program(dispatcher: &str) -> Program {
    let sets = [format!("moe.dispatcher={dispatcher}")];
    let scenario = shardlab_plan::scenario::load("small-moe-ep".as_ref(), &sets).unwrap();
    shardlab_plan::plan(&scenario).unwrap()
}

fn range(address: usize, bytes: u64) -> RawRange {
    RawRange {
        ptr: std::ptr::without_provenance_mut(address),
        bytes: bytes as usize,
        dtype: DType::U8,
    }
}

#[test]
fn programs_push_on_one_stream_of_one_communicator() {
    let peer = program("peer");
    let comm = communicator(&peer).unwrap();
    assert_eq!(peer.communicators[comm.index()].ranks.size, 2);
    assert_eq!(streams(&peer, comm).len(), 1);
    assert_eq!(communicator(&program("gather")), None);
}

#[test]
fn a_push_is_rows_that_choices_name_and_windows_of_all_ranks() {
    let program = program("peer");
    let window = Window {
        bytes: 1 << 30,
        me: 1,
        starts: vec![0x9000_0000, 0x1_0000_0000],
    };
    let windows = Windows::new(vec![window]);
    let mut kinds = BTreeSet::new();
    for c in program.collectives.iter().filter(|c| c.kind.pushes()) {
        kinds.insert(c.kind);
        let (part, sent) = (c.parts[0], c.sent.unwrap());
        let parts = |window| {
            [
                (
                    range(0x2000, part.input.bytes),
                    range(window, part.output.bytes),
                ),
                (
                    range(0x3000, sent.by.input.bytes),
                    range(0x3000, sent.by.input.bytes),
                ),
            ]
        };
        let of = rows(c, 2, &parts(0x1_0000_0400), &windows)
            .unwrap()
            .unwrap();
        let back = c.kind == CollectiveKind::PeerReturn;
        assert_eq!(of.to[..3], [0x9000_0400, 0x1_0000_0400, 0]);
        assert_eq!(u64::from(of.tokens) * 2, sent.of.rows());
        assert_eq!(u64::from(of.tokens * of.width) * 2, part.output.bytes);
        assert_eq!(u64::from(of.tokens * 2 * of.k) * 8, sent.by.input.bytes);
        assert_eq!(
            (of.from, of.choices, of.back),
            (0x2000, 0x3000, u32::from(back))
        );
        // Memory that was added later is not mapped, so NCCL carries these rows on all ranks.
        assert_eq!(rows(c, 2, &parts(0x8000_0000), &windows), Ok(None));
        let mut short = parts(0x1_0000_0400);
        short[0].0.bytes -= 16;
        assert!(rows(c, 2, &short, &windows).is_err());
        assert!(rows(c, 2, &parts(0x1_0000_0400)[..1], &windows).is_err());
    }
    assert_eq!(
        kinds,
        [CollectiveKind::PeerPush, CollectiveKind::PeerReturn].into()
    );
}
