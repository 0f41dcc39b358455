use super::metadata::{Chunk, Metadata, Place, Tensor};
use super::{archive, import};
use shardlab_exec::train::Kind;
use shardlab_exec::train::checkpoint::Checkpoint;
use shardlab_import::pickle::Value;
use std::path::Path;

fn place(file: &str, at: u64) -> Place {
    Place {
        file: file.to_owned(),
        at: [at, 10],
    }
}

#[test]
fn metadata_are_read_as_written() {
    let chunk = |from, to, file| Chunk {
        offsets: vec![from, 0],
        sizes: vec![to - from, 5],
        place: place(file, from),
    };
    let mut metadata = Metadata::default();
    let matrix = Tensor {
        size: vec![7, 5],
        chunks: vec![chunk(0, 4, "__0_0.distcp"), chunk(4, 7, "__1_0.distcp")],
    };
    metadata.tensors.insert("model.a.weight".to_owned(), matrix);
    let scalar = Chunk {
        offsets: vec![],
        sizes: vec![],
        place: place("__0_0.distcp", 40),
    };
    let step = Tensor {
        size: vec![],
        chunks: vec![scalar],
    };
    metadata
        .tensors
        .insert("optimizer.state.a.weight.step".to_owned(), step);
    metadata.values.insert(
        "optimizer.param_groups.0.lr".to_owned(),
        place("__0_0.distcp", 50),
    );
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(".metadata"), metadata.write()).unwrap();
    assert_eq!(Metadata::read(dir.path()).unwrap(), metadata);
    // Damage causes an error, never a panic.
    let bytes = metadata.write();
    for end in (0..bytes.len()).step_by(7) {
        std::fs::write(dir.path().join(".metadata"), &bytes[..end]).unwrap();
        assert!(Metadata::read(dir.path()).is_err(), "{end}");
    }
    std::fs::write(dir.path().join(".metadata"), b"cos\nsystem\n(S'true'\ntR.").unwrap();
    let e = Metadata::read(dir.path()).unwrap_err().to_string();
    assert!(e.contains("os.system"), "{e}");
}

#[test]
fn archives_are_read_as_written() {
    let values = [1.0, -2.5, 3.0, f32::MIN_POSITIVE, 0.0, 6.0];
    for shape in [vec![2, 3], vec![6], vec![1, 6, 1]] {
        let bytes = archive::tensor(&shape, &values).unwrap();
        assert_eq!(archive::read(&bytes).unwrap(), (shape, values.to_vec()));
    }
    let scalar = archive::tensor(&[], &[7.0]).unwrap();
    assert_eq!(archive::read(&scalar).unwrap(), (vec![], vec![7.0]));
    let plain = archive::plain(&Value::Float(0.5)).unwrap();
    assert!(archive::read(&plain).is_err());
    for end in (0..scalar.len()).step_by(11) {
        assert!(archive::read(&scalar[..end]).is_err(), "{end}");
    }
}

/// Output of PyTorch 2.15 on two ranks with rows that do not divide evenly
/// (`tests/data/dcp/make.py`).
#[test]
fn folders_of_pytorch_are_read() {
    let data = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dcp"));
    let scenario = data.join("linear.toml");
    let scenario = shardlab_plan::scenario::load(&scenario, &[]).unwrap();
    let program = shardlab_plan::plan(&scenario).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let made = import(&data.join("fsdp2"), &scenario, &program, dir.path()).unwrap();
    assert_eq!((made.step, made.unused.len()), (3, 0));
    let mut checkpoint = Checkpoint::open(&made.path).unwrap();
    let text = std::fs::read_to_string(data.join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let names: Vec<String> = program.params.iter().map(|p| p.name.clone()).collect();
    for (param, name) in names.iter().enumerate() {
        for kind in Kind::ALL {
            let found = checkpoint.whole(param, kind).unwrap().unwrap();
            let expected = expected[name][kind.name()].as_array().unwrap();
            let expected: Vec<f32> = expected
                .iter()
                .map(|x| x.as_f64().unwrap() as f32)
                .collect();
            assert_eq!(found, expected, "{name} {}", kind.name());
        }
    }
    // The same step again, and another model.
    let again = import(&data.join("fsdp2"), &scenario, &program, dir.path());
    assert!(again.unwrap_err().to_string().contains("step 3 or later"));
    let other = shardlab_plan::scenario::load(Path::new("small-qwen3"), &[]).unwrap();
    let program = shardlab_plan::plan(&other).unwrap();
    let e = import(&data.join("fsdp2"), &other, &program, dir.path()).unwrap_err();
    assert!(
        e.to_string().contains("has no weights of this model"),
        "{e}"
    );
}
