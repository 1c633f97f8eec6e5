//! Buffers for tests that end where readable memory ends: one element too far is a segmentation fault.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Elements whose last byte is followed by a page without access. The page before them has none either.
pub(crate) struct Guarded<T> {
    mapping: NonNull<u8>,
    bytes: usize,
    start: NonNull<T>,
    len: usize,
}

impl<T: bytemuck::Pod> Guarded<T> {
    /// A copy of `elements`.
    pub(crate) fn new(elements: &[T]) -> Self {
        // SAFETY: asks the system for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inner = size_of_val(elements).next_multiple_of(page);
        let bytes = inner + 2 * page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, then access to its inner pages; the elements are written into those.
        unsafe {
            let mapping = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(mapping, libc::MAP_FAILED);
            let mapping: NonNull<u8> = NonNull::new(mapping.cast()).expect("not at zero");
            let opened = libc::mprotect(mapping.add(page).as_ptr().cast(), inner, libc::PROT_READ | libc::PROT_WRITE);
            assert_eq!(opened, 0);
            let start: NonNull<T> = mapping.add(page + inner - size_of_val(elements)).cast();
            start.copy_from_nonoverlapping(NonNull::from(elements).cast(), elements.len());
            Self { mapping, bytes, start, len: elements.len() }
        }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: written by `new`, alive until `drop`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as `deref`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, with its length.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.bytes) };
    }
}
