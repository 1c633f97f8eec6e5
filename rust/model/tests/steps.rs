//! Steps as bytes: every step survives the way, and bytes or numbers that are no step are refused by name.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::KvFormat;
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    LastOutput, LoadOptions, LogitRows, ModelSpec, PageCopy, Quantization, Source, Stage, StagePart, StageRunError,
    StageSequence, StageStep, StepError,
};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

fn sequences() -> impl Strategy<Value = StageSequence> {
    let rows = [LogitRows::None, LogitRows::First, LogitRows::Last, LogitRows::All, LogitRows::LastLargest];
    let lists = (vec(any::<u32>(), 0..6), vec(any::<u32>(), 0..6), vec(vec(any::<u32>(), 0..4), 0..4));
    let numbers = (0..=u32::MAX as usize, 0..=u32::MAX as usize, proptest::sample::select(rows.to_vec()));
    (lists, numbers).prop_map(|((tokens, token_types, pages), (first_position, prompt_len, logits))| StageSequence {
        tokens,
        first_position,
        prompt_len,
        pages,
        token_types,
        logits,
    })
}

fn steps() -> impl Strategy<Value = StageStep> {
    let copies =
        (0..=u32::MAX as usize, any::<u32>(), any::<u32>()).prop_map(|(group, from, to)| PageCopy { group, from, to });
    let last = proptest::sample::select(vec![LastOutput::Logits, LastOutput::HiddenStates]);
    (vec(copies, 0..4), vec(sequences(), 0..4), last).prop_map(|(copies, sequences, last)| StageStep {
        copies,
        sequences,
        last,
    })
}

proptest! {
    #[test]
    fn steps_survive_as_bytes(step in steps()) {
        prop_assert_eq!(StageStep::from_bytes(&step.to_bytes()), Ok(step));
    }

    #[test]
    fn bytes_that_are_cut_or_longer_are_refused(step in steps(), cut in any::<proptest::sample::Index>()) {
        let bytes = step.to_bytes();
        prop_assert!(StageStep::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
        let longer = [&bytes[..], &[0; 4]].concat();
        prop_assert_eq!(StageStep::from_bytes(&longer), Err(StepError::Trailing { words: 1 }));
    }

    #[test]
    fn any_words_are_a_step_or_an_error(words in vec(0u32..5, 0..60)) {
        let header = [u32::from_le_bytes(*b"FSTP"), 2];
        let bytes: Vec<u8> = header.iter().chain(&words).flat_map(|word| word.to_le_bytes()).collect();
        if let Ok(step) = StageStep::from_bytes(&bytes) {
            prop_assert_eq!(step.to_bytes(), bytes);
        }
    }
}

#[test]
fn errors_of_bytes_name_what_is_wrong() {
    let step = StageStep { copies: Vec::new(), sequences: vec![sequence()], last: LastOutput::Logits };
    let bytes = step.to_bytes();
    let with = |word: usize, value: u32| {
        let mut bytes = bytes.clone();
        bytes[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
        StageStep::from_bytes(&bytes).unwrap_err().to_string()
    };
    for (word, value, expected) in [
        (0, 7, "stage step must begin with FSTP and be whole words of 4 bytes, got 72 bytes"),
        (1, 9, "stage step must have format version 2, got 9 (all workers need the same ferrule)"),
        (2, 2, "stage step: last must be 0 (logits) or 1 (hidden states), got 2"),
        (3, 9, "stage step ends within copies, which needs 27 more words, got 13"),
        (5, 99, "stage step ends within tokens, which needs 99 more words, got 7"),
        (
            10,
            5,
            "stage step: sequences[0].logits must be 0 (none), 1 (first), 2 (last), 3 (all) or 4 (largest of the last), \
             got 5",
        ),
    ] {
        assert_eq!(with(word, value), expected);
    }
    assert_eq!(StageStep::from_bytes(&bytes[..7]), Err(StepError::Format { bytes: 7 }));
}

/// Returns two tokens at the beginning of a page, for a model with a state and a window.
fn sequence() -> StageSequence {
    StageSequence {
        tokens: vec![5, 6],
        first_position: 0,
        prompt_len: 2,
        pages: vec![vec![0, 1], vec![2]],
        token_types: Vec::new(),
        logits: LogitRows::Last,
    }
}

/// Returns a first stage with states in one layer and a window of 40 in another, and four pages of each group.
fn stage() -> Stage {
    let mut spec = specs::llama(96, 3);
    let block = &mut spec["layers"][0]["blocks"][0];
    block["name"] = json!("convolution");
    block["mixer"] = json!({"type": "short_convolution", "channels": 64, "taps": 4, "bias": true});
    for layer in [1, 2] {
        spec["layers"][layer]["blocks"][0]["mixer"]["window"] = json!(20);
    }
    let spec = ModelSpec::from_json(&spec.to_string()).unwrap();
    let quantization = Quantization::named("int8").unwrap();
    let options = LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
    let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
    let part = StagePart { layers: 0..2, stage: 0, stages: 1, group: None };
    let mut stage = Stage::load(spec, part, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap();
    stage.allocate_kv(&[4, 4]).unwrap();
    stage
}

#[test]
fn numbers_outside_their_limits_are_refused_by_field() {
    let mut stage = stage();
    let width = stage.input_width();
    let mut run = |step: &StageStep| {
        let tokens = step.sequences.iter().map(|sequence| sequence.tokens.len()).sum::<usize>();
        stage.step(step, &vec![0.0; tokens * width], &Cancel::new(), &mut Vec::new())
    };
    let step = |copies: Vec<PageCopy>, sequences: Vec<StageSequence>| StageStep {
        copies,
        sequences,
        last: LastOutput::Logits,
    };
    let copy = |group, from, to| step(vec![PageCopy { group, from, to }], Vec::new());
    let one = |change: fn(&mut StageSequence)| {
        let mut sequence = sequence();
        change(&mut sequence);
        step(Vec::new(), vec![sequence])
    };
    assert_eq!(run(&step(vec![PageCopy { group: 1, from: 0, to: 3 }], vec![sequence()])), Ok(()));
    // Pages outside of the window are not read.
    let late = |page| {
        let mut late = sequence();
        (late.first_position, late.prompt_len) = (48, 50);
        late.pages = vec![vec![0, 1], vec![u32::MAX, page, 2, 3]];
        step(Vec::new(), vec![late])
    };
    assert_eq!(run(&late(1)), Ok(()));
    for (step, expected) in [
        (copy(2, 0, 1), "copies[0].group must be below 2, got 2"),
        (copy(0, 4, 1), "copies[0].from must be below 4, got 4"),
        (copy(1, 0, 4), "copies[0].to must be below 4, got 4"),
        (one(|one| one.tokens.clear()), "sequences[0].tokens (their number) must be at least 1, got 0"),
        (one(|one| one.tokens[1] = 96), "sequences[0].tokens[1] must be below 96, got 96"),
        (one(|one| one.first_position = 255), "sequences[0].first_position must be at most 254 for 2 tokens, got 255"),
        (
            one(|one| one.token_types = vec![0]),
            "sequences[0].token_types (their number) must be 0 or 2, the number of tokens, got 1",
        ),
        (one(|one| one.token_types = vec![0, 1]), "sequences[0].token_types[1] must be below 1, got 1"),
        (
            one(|one| one.pages.truncate(1)),
            "sequences[0].pages (their number) must be 2, the number of groups of the model, got 1",
        ),
        (one(|one| one.pages[0].truncate(1)), "sequences[0].pages[0] (their number) must be at least 2, got 1"),
        (one(|one| one.pages[1].clear()), "sequences[0].pages[1] (their number) must be at least 1, got 0"),
        (one(|one| one.pages[1][0] = 4), "sequences[0].pages[1][0] must be below 4, got 4"),
        (one(|one| one.pages[0][1] = u32::MAX), "sequences[0].pages[0][1] must be below 4, got 4294967295"),
        (late(u32::MAX), "sequences[0].pages[1][1] must be below 4, got 4294967295"),
        (
            step(Vec::new(), vec![sequence(), sequence()]),
            "sequences[1].pages[0][1] must be a page that no other sequence writes, got 1",
        ),
    ] {
        let error = run(&step).unwrap_err();
        assert!(matches!(error, StageRunError::Step(StepError::Number { .. })), "{error}");
        assert_eq!(error.to_string(), format!("stage step: {expected}"));
    }
}
