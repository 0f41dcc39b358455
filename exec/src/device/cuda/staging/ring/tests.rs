use super::*;
use proptest::prelude::*;

/// Returns the places of data of a given length, in order.
fn places(ring: &mut Ring, mut bytes: usize) -> Vec<Place> {
    let mut all = Vec::new();
    while bytes > 0 {
        let place = ring.place(bytes);
        bytes -= place.bytes;
        all.push(place);
    }
    all
}

const fn at(block: usize, offset: usize, bytes: usize) -> Place {
    Place {
        block,
        offset,
        bytes,
        turn: None,
    }
}

const fn turned(place: Place, left: usize, wait: bool) -> Place {
    Place {
        turn: Some(Turn { left, wait }),
        ..place
    }
}

#[test]
fn small_data_share_a_block_from_aligned_bytes_on() {
    let mut ring = Ring::new(3, 100, 16);
    assert_eq!(places(&mut ring, 10), [at(0, 0, 10)]);
    assert_eq!(places(&mut ring, 32), [at(0, 16, 32)]);
    // To the last byte: 48 + 52.
    assert_eq!(places(&mut ring, 52), [at(0, 48, 52)]);
    assert_eq!(places(&mut ring, 1), [turned(at(1, 0, 1), 0, false)]);
    // Data that do not fit in the rest of a block are not split to fill it.
    assert_eq!(places(&mut ring, 85), [turned(at(2, 0, 85), 1, false)]);
}

#[test]
fn large_data_go_around_and_wait_for_blocks_filled_before() {
    let mut ring = Ring::new(2, 100, 16);
    assert_eq!(places(&mut ring, 20), [at(0, 0, 20)]);
    let expected = [
        turned(at(1, 0, 100), 0, false),
        turned(at(0, 0, 100), 1, true),
        turned(at(1, 0, 50), 0, true),
    ];
    assert_eq!(places(&mut ring, 250), expected);
    ring.reset();
    let expected = [at(0, 0, 100), turned(at(1, 0, 30), 0, false)];
    assert_eq!(places(&mut ring, 130), expected);
}

#[test]
fn one_block_is_waited_for_whenever_it_is_full() {
    let mut ring = Ring::new(1, 64, 16);
    let expected = [
        at(0, 0, 64),
        turned(at(0, 0, 64), 0, true),
        turned(at(0, 0, 2), 0, true),
    ];
    assert_eq!(places(&mut ring, 130), expected);
}

/// Contents of a block while copies from it are in flight.
#[derive(Clone, Default)]
struct Block {
    /// Bytes that have been written since the block was free.
    written: Vec<bool>,
    /// Whether the ring has moved on from the block, so that events follow every copy from it.
    marked: bool,
}

proptest! {
    /// Uploads of several lengths. A length of zero means that the device becomes idle.
    #[test]
    fn bytes_are_covered_once_and_blocks_are_written_again_only_behind_their_events(
        blocks in 1usize..5,
        bytes in 1usize..80,
        align in prop::sample::select(vec![1usize, 4, 16]),
        uploads in prop::collection::vec(0usize..400, 1..30),
    ) {
        let mut ring = Ring::new(blocks, bytes, align);
        let fresh = vec![Block { written: vec![false; bytes], marked: false }; blocks];
        let mut memory = fresh.clone();
        for upload in uploads {
            if upload == 0 {
                ring.reset();
                memory = fresh.clone();
            }
            let mut covered = 0;
            for place in places(&mut ring, upload) {
                if let Some(turn) = place.turn {
                    memory[turn.left].marked = true;
                    if turn.wait {
                        prop_assert!(memory[place.block].marked, "waits for an event that was not recorded");
                        memory[place.block] = fresh[place.block].clone();
                    }
                }
                prop_assert!(place.bytes > 0 && place.offset + place.bytes <= bytes);
                prop_assert_eq!(place.offset % align, 0);
                prop_assert!(!memory[place.block].marked, "a block that was left is written before its event");
                // No byte of the place may still be read.
                for byte in &mut memory[place.block].written[place.offset..place.offset + place.bytes] {
                    prop_assert!(!*byte, "written twice");
                    *byte = true;
                }
                covered += place.bytes;
            }
            // In order and without gaps: each piece begins where the last one ends.
            prop_assert_eq!(covered, upload);
        }
    }

    /// The ring waits for a block as late as possible: after all other blocks have been used.
    #[test]
    fn all_blocks_are_used_before_one_is_waited_for(blocks in 1usize..9, rounds in 1usize..4) {
        let mut ring = Ring::new(blocks, 8, 4);
        let waits: Vec<bool> = places(&mut ring, 8 * blocks * rounds)
            .iter()
            .map(|p| p.turn.is_some_and(|t| t.wait))
            .collect();
        let expected: Vec<bool> = (0..blocks * rounds).map(|n| n >= blocks).collect();
        prop_assert_eq!(waits, expected);
    }
}
