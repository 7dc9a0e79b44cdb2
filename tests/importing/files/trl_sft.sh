accelerate launch --num_processes 4 \
    scripts/sft.py \
    --model_name_or_path HuggingFaceTB/SmolLM2-135M \
    --dataset_name owner/chats \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_length 2048 --packing --learning_rate 2e-4 \
    --use_peft --lora_r 8 --lora_target_modules q_proj v_proj \
    --num_train_epochs 1
