//! Checks of work between steps, on an engine that may have batches in flight.

use ferrule_engine::{EncodeTask, Engine, EngineError, Text};
use ferrule_kernels::Cancel;
use ferrule_model::Adapter;

use super::{FakeModel, VOCAB, first_state, logits_after, mix};

/// Evaluates a sequence between the steps.
pub fn check_evaluation(engine: &mut Engine<FakeModel>, length: usize) {
    let trained = engine.model().trained;
    let adapter = length.is_multiple_of(2).then(|| Adapter::of_nothing([9; 32]));
    let tokens: Vec<i64> = (0..length as i64).map(|index| 60 + index % 4).collect();
    let first = length / 3;
    match engine.logits(&tokens, first, adapter.as_ref(), &Cancel::new()) {
        Ok(logits) => {
            let mut state = first_state(length, trained, adapter.as_ref());
            let expected = tokens.iter().flat_map(|&token| {
                state = mix(state, token as u64);
                logits_after(state)
            });
            assert_eq!(logits, expected.skip(first * VOCAB).collect::<Vec<_>>());
        }
        Err(EngineError::Cancelled) => {}
        Err(EngineError::Request(_)) => assert!(length > engine.max_model_len()),
        Err(error) => panic!("{error}"),
    }
}

/// Encodes texts with common prefixes between the steps.
pub fn check_encoding(engine: &mut Engine<FakeModel>, length: usize) {
    let trained = engine.model().trained;
    let template = |length: usize| (0..length as u32).map(|index| index * 5 % VOCAB as u32).collect();
    let texts = [length, 3, length.div_ceil(2)].map(|length| Text { tokens: template(length), ..Text::default() });
    let task = EncodeTask::Logits { tokens: (0..VOCAB as u32).collect() };
    match engine.encode(&texts, &task, &Cancel::new()) {
        Ok(logits) => {
            let after = |text: &Text| {
                let first = first_state(text.tokens.len(), trained, None);
                logits_after(text.tokens.iter().fold(first, |state, &token| mix(state, token.into())))
            };
            assert_eq!(logits, texts.iter().flat_map(after).collect::<Vec<_>>());
        }
        Err(EngineError::Cancelled) => {}
        Err(EngineError::Encode(_)) => assert!(length.max(3) > engine.max_model_len()),
        Err(error) => panic!("{error}"),
    }
}
